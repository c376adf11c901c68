"""Weights counted from a configuration: those of the published models, and of every real shard."""

import math
from typing import Any

import pytest

from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.lora.attach import attach_lora
from glm5.lora.spec import ExpertLora, LoraSpec
from glm5.plan.memory import stage_elements, stages_of
from glm5.plan.models import read_model
from glm5.plan.weights import Elements, Weight
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout

ALL = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj")
ALL = (*ALL, "down_proj", "wq_b", "wk", "weights_proj")
FULL = Workload(mode="full")


def whole(glm5: Glm5Config, work: Workload = FULL) -> Elements:
    (stage,) = stages_of(glm5, [glm5.num_hidden_layers], 1)
    return stage_elements(glm5, stage, Layout(), work)


@pytest.mark.parametrize(
    ("model", "count"), [("GLM-5", 743_911_199_232), ("zai-org/glm-5.2-fp8", 743_377_000_704)]
)
def test_the_published_models(model: str, count: int) -> None:
    """Megatron-Bridge's model cards give these counts, without the MTP layer."""
    _, glm5 = read_model(model)
    assert whole(glm5).total == whole(glm5).trained == count


@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer", "none"])
@pytest.mark.parametrize("targets", [("o_proj",), ("gate_proj",), ALL])
def test_adapters_are_those_that_are_attached(
    targets: tuple[str, ...], expert_lora: ExpertLora
) -> None:
    from glm5.checkpoint.load import build_for

    glm5 = Glm5Config.from_hf_dict(tiny_config("5.2"))
    (model,) = build_for(glm5, device="cpu")
    spec = LoraSpec(adapter_rank=3, adapter_alpha=6.0, targets=targets, expert_lora=expert_lora)
    attach_lora(model, spec, seed=0)
    found = whole(glm5, Workload(adapter_rank=3, targets=targets, expert_lora=expert_lora))
    assert found.total == sum(p.numel() for p in model.parameters())
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert found.trained == sum(trained.values())
    own = [
        p.numel()
        for n, p in model.named_parameters()
        if n in trained and ".experts." in n and p.shape[0] == glm5.n_routed_experts
    ]
    assert found.experts == sum(own)


def test_the_largest_tensor_of_full_training_is_a_layers_experts() -> None:
    from glm5.checkpoint.load import build_for

    glm5 = Glm5Config.from_hf_dict(tiny_config("5.2"))
    (model,) = build_for(glm5, device="cpu")
    assert whole(glm5).largest == max(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("split", "experts", "own", "adapter", "shared_outer"),
    [
        ("column", 0, 8 * 12 // 3, 2 * (8 // 2 + 12), 2 * (8 // 2 + 12)),
        ("row", 0, 8 * 12 // 3, 2 * (8 + 12 // 2), 2 * (8 + 12 // 2)),
        ("whole", 0, 8 * 12, 2 * (8 + 12), 2 * (8 + 12)),
        ("column", 12, 3 * 8 * 12 // 2, 3 * 2 * (8 // 2 + 12), 3 * 2 * 8 // 2 + 2 * 12),
        ("row", 12, 3 * 8 * 12 // 2, 3 * 2 * (8 + 12 // 2), 3 * 2 * 12 // 2 + 2 * 8),
    ],
)
def test_the_share_of_a_rank(
    split: Any, experts: int, own: int, adapter: int, shared_outer: int
) -> None:
    """tp and etp cut one factor of an adapter; ep 4 leaves three of twelve experts."""
    weight = Weight("x", 8, 12, split, experts)
    assert weight.elements(Layout(tp=3, ep=4, etp=2)) == own
    layout = Layout(tp=2, ep=4, etp=2)
    assert weight.adapter_elements(layout, Workload(adapter_rank=2))[0] == adapter
    work = Workload(adapter_rank=2, expert_lora="shared_outer")
    assert weight.adapter_elements(layout, work)[0] == shared_outer
    nothing = weight.adapter_elements(layout, Workload(adapter_rank=2, expert_lora="none"))[0]
    assert nothing == (0 if experts else adapter)


@pytest.mark.parametrize("model", ["GLM-5", "GLM-5.2"])
def test_float8_weights_are_those_that_a_release_quantises(model: str) -> None:
    """With a byte each and four per block; what ranks cut finer is below a thousandth of that."""
    _, glm5 = read_model(model)
    tensors = hf_tensors(glm5.model_copy(update={"num_nextn_predict_layers": 0}))
    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    float8 = sum(sizes[name] for name, tensor in tensors.items() if tensor.quantisable)
    found = whole(glm5, Workload(targets=(), base_weights="fp8"))
    assert found.float8 == float8
    blocks = sum(
        math.ceil(tensor.shape[0] / 128) * math.ceil(tensor.shape[1] / 128)
        for tensor in tensors.values()
        if tensor.quantisable
    )
    expected = float8 + 4 * blocks + 2 * (found.total - float8)
    assert found.num_bytes == pytest.approx(expected, rel=1e-5)
    plain = whole(glm5, Workload(targets=()))
    assert (plain.float8, plain.num_bytes) == (0, 2 * found.total)
