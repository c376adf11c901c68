"""Short documents attend densely: the same numbers as over a selection, and no indexer runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.lora.attach import adapter_pairs, attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS
from glm5.model.forward import logits
from glm5.model.indexer import LightningIndexer
from glm5.ops import torch_backend
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

# The tiny models select 8 keys.
PACKS = ([8], [3, 8, 1], [20, 8, 1, 9, 2])


def all_sparse(model: GPTModel, token_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """What `logits` computes, for documents whose lengths the host does not know."""
    cut = cu_seqlens.int()
    return model(
        token_ids[None],
        torch.arange(len(token_ids))[None],
        attention_mask=None,
        packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=cut, cu_seqlens_kv=cut),
    )[0]


def adapt(model: GPTModel) -> None:
    attach_lora(model, LoraSpec(adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS), seed=0)
    for *_, pair in adapter_pairs(model):
        torch.nn.init.normal_(pair.b, std=0.1)


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("adapted", [False, True])
def test_equals_the_sparse_path(tiny_folder: TinyFolder, lengths: list[int], adapted: bool) -> None:
    """kv_b_proj and its adapter are used unabsorbed here and absorbed there."""
    model = load_model(tiny_folder("5.2")).train()
    if adapted:
        adapt(model)
    tokens, cut = draw_tokens(sum(lengths)), edges(lengths)
    results = []
    for forward in (logits, all_sparse):
        model.zero_grad(set_to_none=True)
        out = forward(model, tokens, cut)
        probe_loss(out).backward()
        results.append((out.detach(), gradients(model)))
    (dense, dense_gradients), (sparse, sparse_gradients) = results
    assert not torch.equal(dense, sparse), "both took the same path"
    assert_close(dense, sparse, limit=1e-5)
    assert_all_close(dense_gradients, sparse_gradients, limit=3e-5)


@pytest.fixture
def counted(tiny_folder: TinyFolder) -> Iterator[tuple[GPTModel, list[Any]]]:
    """A model whose indexers can learn, and the selections that its indexers made."""
    model = load_model(tiny_folder("5.2"), indexer_loss_coeff=0.5)
    made: list[Any] = []
    select = LightningIndexer.select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LightningIndexer,
            "select",
            lambda *args: made.append(select(*args)) or made[-1],
        )
        yield model, made


def test_no_indexer_runs_for_short_documents(counted: tuple[GPTModel, list[Any]]) -> None:
    model, made = counted
    logits(model, draw_tokens(12), edges([3, 8, 1]))
    assert made == []
    logits(model, draw_tokens(40), edges([20, 8, 1, 9, 2]))
    assert len(made) == 4
    short = torch.tensor([False] * 20 + [True] * 9 + [False] * 9 + [True] * 2)
    for topk_indices in made:
        assert topk_indices.shape == (40, 8)
        assert ((topk_indices >= 0).any(1) == ~short).all()


def test_an_indexer_that_learns_or_is_observed_selects_for_all(
    counted: tuple[GPTModel, list[Any]],
) -> None:
    model, made = counted
    model.train()
    logits(model, draw_tokens(12), edges([3, 8, 1]))
    model.eval()
    for _, indexer in modules_of(model, LightningIndexer):
        indexer.observed = True
    logits(model, draw_tokens(12), edges([3, 8, 1]))
    assert len(made) == 8
    assert all((topk_indices >= 0).any(1).all() for topk_indices in made)


def test_a_frozen_indexer_does_not_run_in_training(counted: tuple[GPTModel, list[Any]]) -> None:
    model, made = counted
    for _, indexer in modules_of(model, LightningIndexer):
        indexer.requires_grad_(False)
    probe_loss(logits(model.train(), draw_tokens(12), edges([3, 8, 1]))).backward()
    assert made == []


@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_attention_reaches_the_backend_and_is_all_sparse(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    calls: list[tuple[int, bool]] = []
    sparse_mla = torch_backend.sparse_mla

    def noted(q: Tensor, *rest: Any, deterministic: bool) -> Any:
        calls.append((len(q), deterministic))
        return sparse_mla(q, *rest, deterministic=deterministic)

    monkeypatch.setattr(torch_backend, "sparse_mla", noted)
    model = load_model(tiny_folder("5.2"), deterministic_attention=wanted)
    logits(model, draw_tokens(12), edges([9, 3]))
    assert calls == [(12 if wanted else 9, wanted)] * 7


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gives_the_same_bits(tiny_folder: TinyFolder, recompute: str) -> None:
    found = []
    for how in ("none", recompute):
        model = load_model(tiny_folder("5.2"), recompute=how).train()
        probe_loss(logits(model, draw_tokens(40), edges([20, 8, 1, 9, 2]))).backward()
        found.append(gradients(model))
    assert_all_close(found[1], found[0], limit=0)


def test_the_indexers_gradients_do_not_depend_on_the_route(tiny_folder: TinyFolder) -> None:
    """Full layers whose indexer learns are sparse throughout; the layers that share are not."""
    found = []
    for forward in (logits, all_sparse):
        model = load_model(tiny_folder("5.2"), indexer_loss_coeff=0.5).train()
        probe_loss(forward(model, draw_tokens(40), edges([20, 8, 1, 9, 2]))).backward()
        found.append(gradients(model))
    assert any(g.any() for name, g in found[0].items() if ".indexer." in name)
    assert_all_close(found[0], found[1], limit=3e-5)
