"""At 8,192 tokens no [t, t] tensor is made, and the temporaries stay within the chunk budget."""

import pytest
import torch
from torch import Tensor

from glm5.ops.indexer.reference import index_scores, select_topk
from glm5.ops.indexer_kl.reference import indexer_kl, indexer_kl_dense
from glm5.ops.key_sets import CHUNK_BYTES
from glm5.ops.masks import document_bounds
from glm5.ops.sparse_mla.reference import sparse_mla_with_mass
from tests.ops.memory import Memory, measure_memory

T, H, D_QK, D_V, H_I, D_I, TOPK = 8192, 2, 24, 16, 2, 16, 256
Index = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def index() -> Index:
    return torch.randn(T, H_I, D_I), torch.randn(T, D_I), torch.randn(T, H_I)


@pytest.fixture(scope="module")
def recent() -> Tensor:
    """Every second key before the query: chunks span many keys."""
    offsets = torch.arange(-2 * (TOPK - 1), 1, 2)
    indices = torch.arange(T)[:, None] + offsets
    packed = torch.where(indices < 0, T, indices).sort(dim=1).values
    return packed.masked_fill(packed == T, -1).int()


def _assert_bounded(memory: Memory, *results: Tensor) -> None:
    # A [t, t] mask of one byte an element would already be too much.
    assert memory.largest_bytes < T * T
    result_bytes = sum(x.nbytes for x in results)
    assert memory.peak_bytes < CHUNK_BYTES + 2 * result_bytes


def test_the_measure_sees_a_square() -> None:
    q, k, weights = torch.randn(64, 1, 2), torch.randn(64, 2), torch.randn(64, 1)
    _, memory = measure_memory(lambda: index_scores(q, k, weights))
    assert memory.largest_bytes >= 64 * 64 * 4
    assert memory.peak_bytes >= 2 * 64 * 64 * 4


def test_select_topk(index: Index) -> None:
    bounds = document_bounds(torch.tensor([0, T]), T)
    selected, memory = measure_memory(lambda: select_topk(*index, *bounds, TOPK))
    _assert_bounded(memory, selected)


def test_sparse_mla(recent: Tensor) -> None:
    q, kv = torch.randn(T, H, D_QK, requires_grad=True), torch.randn(T, D_QK, requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        out, *rest = sparse_mla_with_mass(q, kv, recent, 0.2, D_V)
        return out, *rest, *torch.autograd.grad(out, (q, kv), out)

    results, memory = measure_memory(run)
    _assert_bounded(memory, *results)


def test_indexer_kl(index: Index, recent: Tensor) -> None:
    inputs = [x.clone().requires_grad_() for x in index]
    mass = torch.rand(T, TOPK).masked_fill(recent < 0, 0)

    def run() -> tuple[Tensor, ...]:
        kl = indexer_kl(*inputs, recent, mass)
        return kl, *torch.autograd.grad(kl.sum(), inputs)

    results, memory = measure_memory(run)
    _assert_bounded(memory, *results)


def test_indexer_kl_dense(index: Index) -> None:
    inputs = [x.clone().requires_grad_() for x in index]
    q, kv, lse = torch.randn(T, H, D_QK), torch.randn(T, D_QK), torch.full((T, H), 9.0)
    bounds = document_bounds(torch.tensor([0, T]), T)

    def run() -> tuple[Tensor, ...]:
        kl = indexer_kl_dense(*inputs, q, kv, lse, 0.2, *bounds)
        return kl, *torch.autograd.grad(kl.sum(), inputs)

    results, memory = measure_memory(run)
    _assert_bounded(memory, *results)
