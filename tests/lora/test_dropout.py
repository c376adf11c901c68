"""Dropout of a pair's input: the mask of a seed, in training alone, the same when recomputed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.lora.attach import adapted_modules, adapter_pairs, attach_lora
from glm5.lora.dropout import LoraDropout, seed_masks
from glm5.lora.spec import ExpertLora, LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS, INDEXER_TARGETS
from glm5.model.forward import logits
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    draw_tokens,
    edges,
    gradients,
    probe_loss,
)

P = 0.25
LENGTHS = (25, 1, 9)
TARGETS = (*(name for name in DEFAULT_TARGETS if name != "kv_b_proj"), *INDEXER_TARGETS)


def adapted(
    folder: Path, *, dropout: float = P, expert_lora: ExpertLora = "per_expert", **options: Any
) -> GPTModel:
    """A model with adapters on all that can have dropout, B != 0."""
    model = load_model(folder, indexer_loss_coeff=0.5, **options)
    spec = LoraSpec(
        adapter_rank=3,
        adapter_alpha=6.0,
        targets=TARGETS,
        dropout=dropout,
        expert_lora=expert_lora,
    )
    attach_lora(model, spec, seed=0)
    generator = torch.Generator().manual_seed(7)
    for *_, pair in adapter_pairs(model):
        pair.b.data.copy_(0.2 * torch.randn(pair.b.shape, generator=generator))
    return model


def run(model: GPTModel, step: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of two micro-batches in flight, in training mode."""
    model.train().zero_grad(set_to_none=True)
    seed_masks(0, step)
    outs = [logits(model, draw_tokens(sum(LENGTHS), seed=s), edges(LENGTHS)) for s in (0, 1)]
    for out in outs:
        probe_loss(out).backward()
    return torch.cat(outs).detach(), gradients(model)


def test_elements_are_dropped_and_the_rest_is_scaled() -> None:
    torch.manual_seed(0)
    x = torch.rand(200, 100, dtype=torch.float64).add(1).requires_grad_()
    y = LoraDropout(P, "rank 0")(x)
    kept = y != 0
    assert torch.equal(y, x * kept / (1 - P))
    # 20,000 draws: four standard deviations
    assert abs(float(kept.double().mean()) - (1 - P)) < 4 * (P * (1 - P) / kept.numel()) ** 0.5
    # neither rows nor columns are dropped as a whole
    assert bool(kept.any(0).all()) and not bool(kept.all(0).any())
    y.sum().backward()
    assert torch.equal(x.grad, kept.double() / (1 - P))


def test_the_mask_depends_on_step_call_and_holder() -> None:
    def masks(seed: int, step: int, holder: str) -> list[Tensor]:
        seed_masks(seed, step)
        drop = LoraDropout(0.5, holder)
        return [drop(torch.ones(64)) for _ in range(2)]

    first = masks(0, 1, "rank 0")
    assert all(map(torch.equal, first, masks(0, 1, "rank 0")))
    others = [masks(1, 1, "rank 0"), masks(0, 2, "rank 0"), masks(0, 1, "rank 1")]
    drawn = [*first, *(mask for pair in others for mask in pair)]
    assert len({tuple(mask.tolist()) for mask in drawn}) == len(drawn)


def test_nothing_is_kept_for_the_backward_pass_but_the_seed() -> None:
    saved: list[Tensor] = []
    x = torch.rand(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        LoraDropout(P, "rank 0")(x)
    assert saved == []


@pytest.fixture(scope="module")
def dropped(tiny_folder: TinyFolder) -> Callable[[str], tuple[Tensor, dict[str, Tensor]]]:
    """dropped(expert_lora) -> what a run without recompute gives."""
    known: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def get(expert_lora: ExpertLora) -> tuple[Tensor, dict[str, Tensor]]:
        if expert_lora not in known:
            known[expert_lora] = run(adapted(tiny_folder("5"), expert_lora=expert_lora))
        return known[expert_lora]

    return get


@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_drops_the_same_elements(
    tiny_folder: TinyFolder,
    dropped: Callable[[str], tuple[Tensor, dict[str, Tensor]]],
    recompute: str,
    expert_lora: ExpertLora,
) -> None:
    got = run(adapted(tiny_folder("5"), expert_lora=expert_lora, recompute=recompute))
    expected = dropped(expert_lora)
    assert torch.equal(got[0], expected[0])
    assert all(gradient.any() for gradient in expected[1].values())
    assert_all_close(got[1], expected[1])


def test_other_steps_drop_other_elements(tiny_folder: TinyFolder) -> None:
    model = adapted(tiny_folder("5"))
    first, again, other = run(model), run(model), run(model, step=2)
    assert torch.equal(first[0], again[0])
    assert_all_close(again[1], first[1])
    assert not torch.equal(first[0], other[0])


@torch.no_grad()
def test_evaluation_drops_nothing(tiny_folder: TinyFolder) -> None:
    ids = draw_tokens(30)
    with_dropout, without = (adapted(tiny_folder("5"), dropout=p) for p in (P, 0.0))
    assert torch.equal(logits(with_dropout.eval(), ids), logits(without.eval(), ids))
    assert not torch.equal(logits(with_dropout.train(), ids), logits(without.train(), ids))


@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer"])
def test_only_the_pairs_see_it(tiny_folder: TinyFolder, expert_lora: ExpertLora) -> None:
    """With masks known, every module's output is base(x) + delta(mask * x)."""
    model = adapted(tiny_folder("5"), expert_lora=expert_lora).train()
    plain = adapted(tiny_folder("5"), expert_lora=expert_lora, dropout=0.0).train()
    by_path = dict(adapted_modules(plain))
    checked = 0
    for path, module in adapted_modules(model):
        if module.split == "whole" or "layers.1." not in path:
            continue
        in_features = module.base.weight.shape[-1]
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(6, in_features, generator=generator)
        ends = torch.tensor([0, 1, 1, 3, 3, 5, 6, 6], dtype=torch.int32)
        rest = (ends,) if module.base.weight.ndim == 3 else ()
        seed_masks(0, 9)
        seen = module.pair_input(x)
        assert 0 < int((seen == 0).sum()) < x.numel()
        seed_masks(0, 9)
        got = first(module(x, *rest))
        peer = by_path[path]
        base = first(peer.base(x, *rest))
        expected = base + first(peer(seen, *rest)) - first(peer.base(seen, *rest))
        torch.testing.assert_close(got, expected)
        checked += 1
    # q_b, o; routed and shared fc1 and fc2
    assert checked == 6


def first(out: Tensor | tuple[Tensor, object]) -> Tensor:
    """Without the bias that Megatron's linears hand on."""
    return out[0] if isinstance(out, tuple) else out
