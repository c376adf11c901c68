"""A model on frozen float8 weights is the model on the dequantised ones, and keeps no copy."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import build_for, load_model
from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.lora.attach import adapter_pairs, attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS
from glm5.model.build import build_chunks
from glm5.model.forward import logits
from glm5.model.frozen import (
    BlockScaledWeight,
    FrozenColumnLinear,
    FrozenGroupedLinear,
    FrozenLatentUpProjection,
    FrozenReplicatedLinear,
    FrozenRowLinear,
    own_block,
)
from glm5.model.transformer_config import glm5_transformer_config
from glm5.ops.block_scaled import BLOCK
from glm5.runtime.distributed import current_layout
from tests.ops.memory import measure_memory
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    modules_of,
    probe_loss,
)

# longer than index_topk, shorter, and a single token
LENGTHS = (25, 1, 9, 5)
KINDS = {
    FrozenReplicatedLinear,
    FrozenColumnLinear,
    FrozenRowLinear,
    FrozenLatentUpProjection,
    FrozenGroupedLinear,
}


def run(model: GPTModel) -> Tensor:
    return logits(model, draw_tokens(sum(LENGTHS)), edges(LENGTHS))


def adapted(model: GPTModel) -> GPTModel:
    """Adapters with B != 0 on every target."""
    attach_lora(model, LoraSpec(adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS), seed=0)
    generator = torch.Generator().manual_seed(1)
    for *_, pair in adapter_pairs(model):
        pair.b.data.copy_(0.1 * torch.randn(pair.b.shape, generator=generator))
    return model.train()


@pytest.mark.parametrize("variant", ["5", "5.2"])
@torch.no_grad()
def test_logits_are_those_of_the_dequantised_model(fp8_folder: TinyFolder, variant: str) -> None:
    folder = fp8_folder(variant)
    frozen = load_model(folder, base_weights="fp8")
    assert_close(run(frozen), run(load_model(folder)), 1e-5)
    assert {type(module) for _, module in modules_of(frozen, BlockScaledWeight)} == KINDS


@torch.no_grad()
def test_in_bf16_they_have_the_same_bits(fp8_folder: TinyFolder) -> None:
    """Both multiply by values x scales rounded once to bf16."""
    folder = fp8_folder("5.2", dtype="bfloat16")
    frozen, plain = load_model(folder, base_weights="fp8"), load_model(folder)
    # Megatron multiplies by a frozen weight in another order
    assert torch.equal(run(frozen), run(plain.requires_grad_(False)))


@torch.no_grad()
def test_another_scale_would_show(fp8_folder: TinyFolder) -> None:
    """Negative control: of every kind of linear, one block's scale counts."""
    frozen = load_model(fp8_folder("5.2"), base_weights="fp8")
    expected = run(frozen)
    for kind in KINDS:
        _, module = next(modules_of(frozen, kind))
        scales = module.weight_scale_inv.view(-1)
        scales[0] *= 2
        assert (run(frozen) - expected).abs().max() > 1e-4 * expected.abs().max(), kind
        scales[0] /= 2
    assert torch.equal(run(frozen), expected)


@torch.no_grad()
def test_products_in_float8_differ_by_what_they_round(fp8_folder: TinyFolder) -> None:
    folder = fp8_folder("5")
    exact = run(load_model(folder, base_weights="fp8"))
    rounded = run(load_model(folder, base_weights="fp8", fp8_compute=True))
    assert not torch.equal(exact, rounded)
    assert rounded.isfinite().all()


def weights_of(model: GPTModel) -> Iterator[Tensor]:
    """Every dequantised weight, and the parts of it that are multiplied by themselves."""
    for _, module in modules_of(model, BlockScaledWeight):
        whole = module.block_scaled.dequantise(torch.float32)
        yield from [whole, *whole.unbind()] if whole.ndim == 3 else [whole]
        if isinstance(module, FrozenLatentUpProjection):
            per_head = whole.unflatten(0, (-1, sum(module.head_dims)))
            parts = per_head.split(module.head_dims, dim=1)
            yield from parts
            yield from (head for part in parts for head in part)


def content(tensor: Tensor) -> tuple[int, float]:
    """The same for a copy, a transposed copy, and hardly anything else."""
    return tensor.numel(), round(float(tensor.detach().double().square().sum()), 9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nothing_kept_for_the_backward_is_a_dequantised_weight(
    fp8_folder: TinyFolder, recompute: str
) -> None:
    """Also in the pass that recomputes, which runs inside the backward."""

    def kept_by(model: GPTModel) -> set[tuple[int, float]]:
        kept: set[tuple[int, float]] = set()

        def keep(x: Tensor) -> Tensor:
            if x.dtype == torch.float32:
                kept.add(content(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            probe_loss(run(adapted(model))).backward()
        return kept

    options: dict[str, Any] = {"recompute": recompute}
    frozen = load_model(fp8_folder("5.2"), base_weights="fp8", **options)
    forbidden = {content(weight) for weight in weights_of(frozen)}
    assert not kept_by(frozen) & forbidden
    # the same eyes see what a model in fp32 keeps
    assert kept_by(load_model(fp8_folder("5.2"), **options)) & forbidden


def test_no_dequantised_weight_is_alive_after_the_forward(fp8_folder: TinyFolder) -> None:
    def alive(model: GPTModel) -> set[tuple[int, float]]:
        loss = probe_loss(run(adapted(model)))
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
        found = {content(x) for x in tensors if x.dtype == torch.float32 and not x.is_meta}
        loss.backward()
        return found

    frozen = load_model(fp8_folder("5.2"), base_weights="fp8")
    forbidden = {content(weight) for weight in weights_of(frozen)}
    gc.collect()
    assert not alive(frozen) & forbidden
    assert alive(load_model(fp8_folder("5.2"))) & forbidden


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gives_the_same_gradients(fp8_folder: TinyFolder, recompute: str) -> None:
    found = []
    for mode in ("none", recompute):
        model = adapted(load_model(fp8_folder("5.2"), base_weights="fp8", recompute=mode))
        probe_loss(run(model)).backward()
        found.append(gradients(model))
    # kv_b_proj is used on both sides of the core, and its two gradients may be added in any order
    assert_all_close(found[1], found[0])


def held_bytes(model: GPTModel) -> int:
    held = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in held)


def test_a_model_in_a_wider_dtype_never_exists(fp8_folder: TinyFolder) -> None:
    glm5 = Glm5Config.from_hf(fp8_folder("5.2"))

    def build() -> GPTModel:
        (model,) = build_for(glm5, base_weights="fp8")
        return model

    build()
    model, memory = measure_memory(build)
    assert memory.peak_bytes <= held_bytes(model) * 1.02
    (plain,) = build_for(glm5)
    assert held_bytes(plain) > 2 * held_bytes(model)


def test_no_cast_reaches_the_values(fp8_folder: TinyFolder) -> None:
    model = load_model(fp8_folder("5"), base_weights="fp8")
    before = run(model)
    assert torch.equal(run(model.to("cpu")), before)
    for cast in (model.bfloat16, model.float, model.half, lambda: model.to(torch.float64)):
        with pytest.raises(ConfigError, match="frozen float8 weight cannot be cast"):
            cast()


@pytest.mark.parametrize(
    ("size", "cut", "ranks", "parts", "expected"),
    [
        (576, 0, 1, 1, (128, 128)),
        (288, 0, 2, 1, (32, 128)),
        (2048, 0, 1, 2, (128, 128)),
        (320, 0, 1, 2, (32, 128)),
        (160, 0, 2, 2, (16, 128)),
        (1536, 1, 8, 1, (128, 128)),
        (80, 1, 2, 1, (128, 16)),
    ],
)
def test_blocks_are_as_fine_as_a_part_needs(
    size: int, cut: int, ranks: int, parts: int, expected: tuple[int, int]
) -> None:
    assert own_block((128, 128), size, cut, ranks, parts) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"base_weights": "int4"}, "unknown kind of base_weights"),
        ({"fp8_compute": True}, "fp8_compute multiplies by float8 weights"),
        ({"base_weights": "fp8", "fp8_transient_mib": 0}, "fp8_transient_mib is no size"),
    ],
)
def test_settings_that_mean_nothing(tiny_folder: TinyFolder, options: Any, named: str) -> None:
    folder: Path = tiny_folder("5")
    with pytest.raises(ConfigError, match=named):
        load_model(folder, **options)


def test_without_memory_there_are_float8_shapes(fp8_folder: TinyFolder) -> None:
    """As plans build it."""
    folder = fp8_folder("5.2")
    loaded = load_model(folder, base_weights="fp8", include_mtp=True)
    config = glm5_transformer_config(
        Glm5Config.from_hf(folder),
        device=torch.device("meta"),
        dtype=torch.float32,
        backend="torch",
        layout=current_layout(),
        base_weights="fp8",
        include_mtp=True,
    )
    (model,) = build_chunks(config)

    def described(one: GPTModel) -> dict[str, tuple[torch.Size, torch.dtype]]:
        held = [*one.named_parameters(), *one.named_buffers()]
        return {name: (tensor.shape, tensor.dtype) for name, tensor in held}

    assert described(model) == described(loaded)
    assert all(parameter.is_meta for parameter in model.parameters())
    experts = "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight"
    assert described(model)[experts][1] == torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["glm5", "glm52"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_parts_of_the_published_models_begin_on_blocks(name: str, ranks: int) -> None:
    path = Path(__file__).parents[2] / f"src/glm5/configs/{name}.json"
    glm5 = Glm5Config.from_hf_dict(json.loads(path.read_text()))
    heads = glm5.num_attention_heads
    columns = {"q_b": heads * glm5.qk_head_dim, "kv_b": heads * 448}
    assert glm5.qk_nope_head_dim + glm5.v_head_dim == 448
    gated = (glm5.intermediate_size, glm5.moe_intermediate_size)
    for size in columns.values():
        assert own_block(BLOCK, size // ranks, 0, ranks, 1) == BLOCK
    for width in gated:
        assert own_block(BLOCK, 2 * width // ranks, 0, ranks, 2) == BLOCK
        assert own_block(BLOCK, width // ranks, 1, ranks, 1) == BLOCK
    assert own_block(BLOCK, heads * glm5.v_head_dim // ranks, 1, ranks, 1) == BLOCK
