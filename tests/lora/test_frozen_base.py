"""Adapters on frozen float8 weights have the gradients of those on the dequantised model."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.checkpoint.trained import unfreeze
from glm5.errors import AdapterError
from glm5.lora.attach import adapted_modules, adapter_pairs, attach_lora, is_adapter
from glm5.lora.dropout import seed_masks
from glm5.lora.spec import LoraSpec
from glm5.lora.switch import without_adapters
from glm5.lora.targets import DEFAULT_TARGETS, INDEXER_TARGETS
from glm5.model.forward import logits
from glm5.model.frozen import BlockScaledWeight
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    probe_loss,
)

LENGTHS = (25, 1, 9, 5)


def adapted(model: GPTModel, *targets: str, **options: Any) -> GPTModel:
    attach_lora(
        model, LoraSpec(adapter_rank=3, adapter_alpha=6, targets=targets, **options), seed=0
    )
    generator = torch.Generator().manual_seed(1)
    for *_, pair in adapter_pairs(model):
        pair.b.data.copy_(0.1 * torch.randn(pair.b.shape, generator=generator))
    return model.train()


def run(model: GPTModel) -> tuple[Tensor, dict[str, Tensor]]:
    seed_masks(3, 1)
    out = logits(model, draw_tokens(sum(LENGTHS)), edges(LENGTHS))
    probe_loss(out).backward()
    return out.detach(), gradients(model)


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        *[((name,), {}) for name in DEFAULT_TARGETS],
        (DEFAULT_TARGETS + INDEXER_TARGETS, {}),
        (DEFAULT_TARGETS, {"expert_lora": "shared_outer"}),
        (("o_proj", "q_a_proj", "up_proj", "down_proj"), {"dropout": 0.5}),
    ],
    ids="+".join,
)
def test_gradients_are_those_on_the_dequantised_model(
    fp8_folder: TinyFolder, targets: tuple[str, ...], options: dict[str, Any]
) -> None:
    found = []
    for base_weights in ("fp8", "dtype"):
        model = load_model(fp8_folder("5"), base_weights=base_weights, indexer_loss_coeff=0.5)
        found.append(run(adapted(model, *targets, **options)))
    (got, got_gradients), (expected, expected_gradients) = found
    assert_close(got, expected, 1e-5)
    assert_all_close(got_gradients, expected_gradients, 1e-4, floor=1e-3)
    assert all(is_adapter(name) for name in got_gradients)
    assert any(gradient.any() for gradient in got_gradients.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_have_the_models_dtype(fp8_folder: TinyFolder, dtype: str) -> None:
    model = adapted(load_model(fp8_folder("5"), dtype=dtype, base_weights="fp8"), *DEFAULT_TARGETS)
    assert all(isinstance(m.base, BlockScaledWeight) for _, m in adapted_modules(model))
    for *_, pair in adapter_pairs(model):
        assert pair.a.dtype == pair.b.dtype == getattr(torch, dtype)
    out, found = run(model)
    assert out.dtype == getattr(torch, dtype) and out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found.values())


@torch.no_grad()
def test_without_its_adapters_it_is_the_base(fp8_folder: TinyFolder) -> None:
    ids = draw_tokens(30)
    base = load_model(fp8_folder("5.2"), base_weights="fp8")
    expected = logits(base, ids)
    model = adapted(load_model(fp8_folder("5.2"), base_weights="fp8"), *DEFAULT_TARGETS).eval()
    assert not torch.equal(logits(model, ids), expected)
    with without_adapters([model]):
        assert torch.equal(logits(model, ids), expected)


def test_what_stays_unquantised_can_train_whole(fp8_folder: TinyFolder) -> None:
    model = adapted(load_model(fp8_folder("5"), base_weights="fp8"), "o_proj")
    unfreeze([model], ["router", "norms", "embeddings", "lm_head"])
    _, found = run(model)
    assert {name for name in found if not is_adapter(name)} > {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.layers.1.mlp.router.weight",
    }


def test_a_quantised_weight_cannot_train_whole(fp8_folder: TinyFolder) -> None:
    model = adapted(load_model(fp8_folder("5"), base_weights="fp8"), "q_a_proj")
    with pytest.raises(AdapterError, match=r"(?s)cannot train whole.*o_proj.*lora\.targets"):
        unfreeze([model], [r"o_proj\.weight"])
    assert all(is_adapter(name) for name, p in model.named_parameters() if p.requires_grad)
