"""A model with adapters is the model with scale * B A merged into its weights."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.lora.attach import (
    adapted_modules,
    adapter_pairs,
    attach_lora,
    base_name,
    is_adapter,
)
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS, HF_LINEARS, INDEXER_TARGETS
from glm5.model.forward import logits
from glm5.model.names import by_expert
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    probe_loss,
)

RANK, ALPHA = 3, 6.0
LOCAL_EXPERT = re.compile(r"\.local_experts\.\d+")
LENGTHS = (25, 1, 9)


def spec(*targets: str, **options: Any) -> LoraSpec:
    return LoraSpec(adapter_rank=RANK, adapter_alpha=ALPHA, targets=targets, **options)


def run(model: GPTModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients in training mode."""
    model.train().zero_grad(set_to_none=True)
    out = logits(model, draw_tokens(sum(LENGTHS)), edges(LENGTHS))
    probe_loss(out).backward()
    return out.detach(), gradients(model)


def randomise(model: GPTModel) -> None:
    """B != 0: with B = 0 the delta is 0 and A has no gradient."""
    generator = torch.Generator().manual_seed(7)
    for *_, pair in adapter_pairs(model):
        pair.b.data.copy_(0.2 * torch.randn(pair.b.shape, generator=generator))


def one_by_one(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Stacked experts apart, as adapter_pairs names them."""
    return dict(part for name, tensor in tensors for part in by_expert(name, tensor))


def rows_of(weight: Tensor, path: str, hf_linear: str) -> Tensor:
    """The rows of this Hugging Face linear in the Megatron weight."""
    linears = HF_LINEARS[path.rpartition(".")[2]]
    return weight.chunk(len(linears))[linears.index(hf_linear)]


def merge(adapted: GPTModel, plain: GPTModel) -> None:
    weights = one_by_one(plain.named_parameters())
    for path, hf_linear, pair in adapter_pairs(adapted):
        rows = rows_of(weights[f"{path}.weight"].data, path, hf_linear)
        rows += pair.scale * (pair.b @ pair.a).detach()


def chain_rule(adapted: GPTModel, merged: dict[str, Tensor]) -> dict[str, Tensor]:
    """dA = s B^T dW and dB = s dW A^T, from the gradients of the merged weights.

    Those of stacked factors are stacked, and summed where all experts share the factor.
    """
    merged = one_by_one(merged.items())
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for path, hf_linear, pair in adapter_pairs(adapted):
        if (name := f"{path}.weight") in merged:
            d_w = rows_of(merged[name], path, hf_linear)
            stem = f"{LOCAL_EXPERT.sub('', path)}.pairs.{hf_linear}"
            parts[f"{stem}.a"].append(pair.scale * pair.b.detach().T @ d_w)
            parts[f"{stem}.b"].append(pair.scale * d_w @ pair.a.detach().T)
    like = dict(adapted.named_parameters())
    return {
        name: torch.stack(own).sum_to_size(like[name].shape) if like[name].ndim == 3 else own[0]
        for name, own in parts.items()
    }


@pytest.fixture(scope="module")
def plain(tiny_folder: TinyFolder) -> Callable[[], GPTModel]:
    """plain() -> the 5 model with the weights of the checkpoint and an indexer loss."""
    model = load_model(tiny_folder("5"), indexer_loss_coeff=0.5)
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}

    def restored() -> GPTModel:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(saved[name])
        return model

    return restored


@pytest.fixture
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5"), indexer_loss_coeff=0.5)


@pytest.mark.parametrize(
    "targets",
    [
        *[(name,) for name in DEFAULT_TARGETS],
        *[(name,) for name in INDEXER_TARGETS],
        ("gate_proj", "up_proj"),
        DEFAULT_TARGETS,
        DEFAULT_TARGETS + INDEXER_TARGETS,
    ],
    ids="+".join,
)
def test_adapters_equal_merged_weights(
    model: GPTModel, plain: Callable[[], GPTModel], targets: tuple[str, ...]
) -> None:
    check_against_merged(model, plain, spec(*targets))


@pytest.mark.parametrize("expert_lora", ["shared_outer", "none"])
@pytest.mark.parametrize(
    "targets", [("gate_proj",), ("up_proj",), ("down_proj",), DEFAULT_TARGETS], ids="+".join
)
def test_layouts_of_expert_adapters_equal_merged_weights(
    model: GPTModel, plain: Callable[[], GPTModel], targets: tuple[str, ...], expert_lora: str
) -> None:
    check_against_merged(model, plain, spec(*targets, expert_lora=expert_lora))


@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer"])
def test_other_ranks_and_scales_equal_merged_weights(
    model: GPTModel, plain: Callable[[], GPTModel], expert_lora: str
) -> None:
    options = spec(
        *DEFAULT_TARGETS,
        use_rslora=True,
        rank_pattern={r"experts\.\d+\.up_proj": 5, "layers.0.mlp.down_proj": 1},
        alpha_pattern={"o_proj": 1.5, r"experts\.\d+\.down_proj": 9.0},
        exclude=("shared_experts.gate_proj", "layers.2.self_attn.q_a_proj"),
        expert_lora=expert_lora,
    )
    check_against_merged(model, plain, options)
    found = {f"{path}.{name}": pair for path, name, pair in adapter_pairs(model)}
    up = found["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.up_proj"]
    assert (up.b.shape[1], up.scale) == (5, ALPHA / 5**0.5)
    assert found["decoder.layers.0.self_attention.linear_proj.o_proj"].scale == 1.5 / RANK**0.5
    assert not any("shared_experts.linear_fc1.gate_proj" in name for name in found)
    assert "decoder.layers.1.self_attention.linear_q_down_proj.q_a_proj" in found
    assert "decoder.layers.2.self_attention.linear_q_down_proj.q_a_proj" not in found


def check_against_merged(model: GPTModel, plain: Callable[[], GPTModel], options: LoraSpec) -> None:
    base = plain()
    untouched, _ = run(base)
    attach_lora(model, options, seed=0)
    randomise(model)
    merge(model, base)
    (got, got_gradients), (expected, merged_gradients) = run(model), run(base)
    assert_close(got, expected, 1e-5)
    assert (expected - untouched).abs().max() > 1e-3 * untouched.abs().max()
    assert_all_close(got_gradients, chain_rule(model, merged_gradients), 1e-4, floor=1e-3)
    assert got_gradients.keys() == {
        name for name, _ in model.named_parameters() if is_adapter(name)
    }


def test_a_wrong_scale_would_show(model: GPTModel, plain: Callable[[], GPTModel]) -> None:
    """Negative control of the comparison above."""
    attach_lora(model, spec("o_proj"), seed=0)
    randomise(model)
    base = plain()
    merge(model, base)
    for _, module in adapted_modules(model):
        module.pair("o_proj").scale *= 1.01
    with pytest.raises(AssertionError, match="error"):
        assert_close(run(model)[0], run(base)[0], 1e-5)


def test_every_linear_of_a_decoder_layer_is_reached(model: GPTModel) -> None:
    attach_lora(model, spec(*DEFAULT_TARGETS), seed=0)
    found = {f"{path}.{hf_linear}" for path, hf_linear, _ in adapter_pairs(model)}
    attention = len(("q_a", "q_b", "kv_a", "kv_b", "o"))
    experts = 8 * 3
    assert len(found) == 3 * attention + 3 + 2 * (3 + experts)
    assert "decoder.layers.2.mlp.experts.local_experts.7.linear_fc2.down_proj" in found
    assert "decoder.layers.1.mlp.shared_experts.linear_fc1.up_proj" in found


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_at_attach_the_logits_are_the_same_bits(tiny_folder: TinyFolder, variant: str) -> None:
    model = load_model(tiny_folder(variant))
    ids = draw_tokens(30)
    with torch.no_grad():
        trainable = logits(model, ids)
        # Megatron multiplies by a frozen weight in another order
        before = logits(model.requires_grad_(False), ids)
        attach_lora(model, spec(*DEFAULT_TARGETS, *INDEXER_TARGETS), seed=0)
        assert torch.equal(logits(model, ids), before)
    assert_close(before, trainable, 2e-6)


def test_the_base_is_frozen_and_gets_no_gradient_memory(model: GPTModel) -> None:
    attach_lora(model, spec("q_a_proj", "gate_proj"), seed=0)
    run(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name
        assert (parameter.grad is not None) == is_adapter(name), name


def test_base_names_are_those_without_adapters(
    model: GPTModel, plain: Callable[[], GPTModel]
) -> None:
    attach_lora(model, spec(*DEFAULT_TARGETS), seed=0)
    names = {base_name(name) for name, _ in model.named_parameters() if not is_adapter(name)}
    assert names == {name for name, _ in plain().named_parameters()}


def test_the_start_depends_on_seed_and_name_alone(tiny_folder: TinyFolder) -> None:
    def start(seed: int, *targets: str) -> dict[str, Tensor]:
        model = load_model(tiny_folder("5"))
        attach_lora(model, spec(*targets), seed=seed)
        return {f"{path}.{name}": pair.a.detach() for path, name, pair in adapter_pairs(model)}

    torch.manual_seed(1)
    alone = start(0, "gate_proj")
    torch.manual_seed(2)
    among_others = start(0, *DEFAULT_TARGETS)
    for name, a in alone.items():
        assert torch.equal(among_others[name], a)
        assert a.abs().max() <= a.shape[1] ** -0.5
        assert a.std() > 0.4 * a.shape[1] ** -0.5
    values = [tuple(a.flatten().tolist()) for a in among_others.values()]
    assert len(set(values)) == len(values)
    other_seed = start(1, "gate_proj")
    assert not any(torch.equal(other_seed[name], a) for name, a in alone.items())


def test_attaching_draws_no_global_random_number(model: GPTModel) -> None:
    state = torch.get_rng_state()
    attach_lora(model, spec("o_proj"), seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_adapters_have_the_dtype_of_their_base(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5", dtype="bfloat16"))
    attach_lora(model, spec(*DEFAULT_TARGETS, *INDEXER_TARGETS), seed=0)
    randomise(model)
    for *_, pair in adapter_pairs(model):
        assert pair.a.dtype == torch.bfloat16
    out, found = run(model)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_mtp_layers_are_left_alone(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"), include_mtp=True)
    attach_lora(model, spec(*DEFAULT_TARGETS), seed=0)
    assert all(path.startswith("decoder.layers.") for path, _ in adapted_modules(model))
    assert not any(p.requires_grad for p in model.mtp.parameters())
