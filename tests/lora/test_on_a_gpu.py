"""The kernels of a GPU, put together: a model's logits and gradients are those of the CPU."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.lora.attach import adapter_pairs, attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS, INDEXER_TARGETS
from glm5.model.forward import logits
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    probe_loss,
)

LENGTHS = (25, 1, 9, 70)


def adapted(model: GPTModel, **options: Any) -> GPTModel:
    """With pairs whose B is not zero."""
    spec = LoraSpec(
        adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS + INDEXER_TARGETS, **options
    )
    attach_lora(model, spec, seed=0)
    generator = torch.Generator().manual_seed(1)
    for *_, pair in adapter_pairs(model):
        pair.b.data.copy_(0.1 * torch.randn(pair.b.shape, generator=generator))
    return model.train()


def run(model: GPTModel) -> tuple[Tensor, dict[str, Tensor]]:
    device = next(model.parameters()).device
    out = logits(model, draw_tokens(sum(LENGTHS)).to(device), edges(LENGTHS).to(device))
    probe_loss(out.cpu()).backward()
    return out.detach().cpu(), {name: grad.cpu() for name, grad in gradients(model).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("base_weights", ["dtype", "fp8"])
def test_logits_and_gradients(
    fp8_folder: TinyFolder, base_weights: str, expert_lora: str, recompute: str
) -> None:
    def loaded(device: str) -> GPTModel:
        options: dict[str, Any] = {"base_weights": base_weights, "recompute": recompute}
        model = load_model(fp8_folder("5.2"), device=device, **options)
        return adapted(model, expert_lora=expert_lora)

    (expected, expected_gradients), (got, got_gradients) = run(loaded("cpu")), run(loaded("cuda"))
    assert_close(got, expected, 1e-4)
    assert_all_close(got_gradients, expected_gradients, 1e-3, floor=1e-3)
    assert any(gradient.any() for gradient in got_gradients.values())
