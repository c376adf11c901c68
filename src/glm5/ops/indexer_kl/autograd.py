"""The indexer's losses of the backend "triton": autograd around the fused kernels."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.errors import BackendError
from glm5.ops.indexer_kl.inputs import SumOverRanks, check_dense_inputs, check_sparse_inputs
from glm5.ops.indexer_kl.triton_divergence import divergence
from glm5.ops.indexer_kl.triton_grads import score_grads
from glm5.ops.indexer_kl.triton_keys import KeyRows
from glm5.ops.indexer_kl.triton_mass import attention_mass
from glm5.ops.precision import FUSED_DTYPES

# Budget of the dense form for one value per query and key of a block of query rows.
_SCRATCH_BYTES = 128 * 2**20


def indexer_kl(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, topk_indices: Tensor, mass: Tensor
) -> Tensor:
    """KL(p || softmax(index scores)) of each query row over its selected keys.

    The contract is that of the reference (arXiv 2512.02556, eq. 4), for bf16, fp16 and fp32: p is
    mass divided by its sum. index_q [t_q, h_i, d_i], index_k [t_k, d_i] one dtype, index_weights
    [t_q, h_i] fp32, topk_indices [t_q, topk] int32, mass [t_q, topk] fp32, 0 where there is no key
    -> kl [t_q] fp32. Products take the inputs' dtype and are summed in fp32; the gradient of
    index_k is summed by atomics, so its last bits change from run to run. Keeps one fp32 value per
    selected key for the backward. No host sync; indices beyond the keys are not checked.
    Raises BackendError for shapes and dtypes that do not fit.
    """
    check_sparse_inputs(index_q, index_k, index_weights, topk_indices, mass)
    _check_dtypes(index_q, index_k)
    return _SparseFunction.apply(index_q, index_k, index_weights, topk_indices, mass)


def indexer_kl_dense(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    softmax_scale: float,
    starts: Tensor,
    ends: Tensor,
    *,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """KL(p || softmax(index scores)) of each query row over all keys in [starts, ends).

    The contract is that of the reference (arXiv 2512.02556, eq. 3), for bf16, fp16 and fp32: p is
    the attention summed over the heads and divided by its sum. Index tensors as of indexer_kl;
    q [t_q, h, d_qk], kv [t_k, d_qk] one dtype, lse [t_q, h] fp32 of the same keys' logits,
    starts, ends [t_q] int32 -> kl [t_q] fp32. Values per query and key are made block by block, and
    again in the backward; sum_over_ranks is called for each block, in both passes. No host sync;
    bounds are cut to the keys.
    Raises BackendError for shapes and dtypes that do not fit.
    """
    check_dense_inputs(index_q, index_k, index_weights, q, kv, lse, starts, ends)
    _check_dtypes(index_q, index_k)
    _check_dtypes(q, kv)
    return _DenseFunction.apply(
        softmax_scale, sum_over_ranks, index_q, index_k, index_weights, q, kv, lse, starts, ends
    )


class _Index(NamedTuple):
    """The index tensors, contiguous, and the keys of each query."""

    q: Tensor
    k: Tensor
    weights: Tensor
    keys: KeyRows

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, KeyRows]:
        """As the kernels take them."""
        return self.q, self.k, self.weights, self.keys

    def blocks(self) -> Iterator[tuple[slice, "_Index"]]:
        """Query rows whose values per key take the budget, and what is theirs."""
        num_rows = max(1, _SCRATCH_BYTES // max(1, 4 * self.keys.width))
        for first in range(0, len(self.q), num_rows):
            some = slice(first, min(first + num_rows, len(self.q)))
            yield some, _Index(self.q[some], self.k, self.weights[some], self.keys.rows(some))

    def scratch(self) -> Tensor:
        """[t_q, keys.width] fp32, not filled."""
        return self.weights.new_empty(len(self.q), self.keys.width)


def _index(q: Tensor, k: Tensor, weights: Tensor, keys: KeyRows) -> _Index:
    return _Index(q.contiguous(), k.contiguous(), weights.float().contiguous(), keys)


class _Grads(NamedTuple):
    """Gradients of the index tensors, added up block by block."""

    q: Tensor
    k: Tensor
    weights: Tensor

    @classmethod
    def of(cls, index: _Index) -> "_Grads":
        grad_k = torch.zeros_like(index.k, dtype=torch.float32)
        return cls(torch.empty_like(index.q), grad_k, torch.empty_like(index.weights))

    def add(self, some: slice, block: _Index, grad_scores: Tensor, grad_kl: Tensor) -> None:
        """What follows from grad_kl [rows] and KL's gradient in the block's scores."""
        written = self.q[some], self.k, self.weights[some]
        score_grads(grad_scores, grad_kl[some], *block.rows, *written)

    def like(self, index_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtypes of the inputs."""
        return self.q, self.k.to(self.q.dtype), self.weights.to(index_weights.dtype)


class _SparseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        topk_indices: Tensor,
        mass: Tensor,
    ) -> Tensor:
        index = _index(index_q, index_k, index_weights, KeyRows.listed(topk_indices))
        kl, grad_scores = index.weights.new_empty(len(index_q)), index.scratch()
        divergence(*index.rows, mass.float().contiguous(), grad_scores, kl)
        ctx.save_for_backward(index_q, index_k, index_weights, topk_indices, grad_scores)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        index_q, index_k, index_weights, topk_indices, grad_scores = ctx.saved_tensors
        index = _index(index_q, index_k, index_weights, KeyRows.listed(topk_indices))
        grads = _Grads.of(index)
        grads.add(slice(None), index, grad_scores, grad_kl.contiguous())
        return *grads.like(index_weights), None, None


class _DenseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        softmax_scale: float,
        sum_over_ranks: SumOverRanks | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.rest = softmax_scale, sum_over_ranks
        index, attention = _all_in_range(tensors, *ctx.rest)
        kl = index.weights.new_empty(len(index.q))
        for some, block in index.blocks():
            divergence(*block.rows, attention.mass(some, block), block.scratch(), kl[some])
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        index, attention = _all_in_range(ctx.saved_tensors, *ctx.rest)
        grads, grad_kl = _Grads.of(index), grad_kl.contiguous()
        for some, block in index.blocks():
            grad_scores, kl = block.scratch(), torch.empty_like(grad_kl[some])
            divergence(*block.rows, attention.mass(some, block), grad_scores, kl)
            grads.add(some, block, grad_scores, grad_kl)
        return None, None, *grads.like(ctx.saved_tensors[2]), *[None] * 5


class _Attention(NamedTuple):
    """What tells the attention's probabilities: q, kv and lse, contiguous."""

    q: Tensor
    kv: Tensor
    lse: Tensor
    softmax_scale: float
    sum_over_ranks: SumOverRanks | None

    def mass(self, some: slice, block: _Index) -> Tensor:
        """[rows, width] fp32: the probabilities of the block's keys, summed over all heads."""
        mass = block.scratch()
        queries = self.q[some], self.kv, self.lse[some]
        attention_mass(*queries, block.keys, self.softmax_scale, mass)
        if self.sum_over_ranks is not None:
            self.sum_over_ranks(mass)
        return mass


def _all_in_range(
    tensors: tuple[Tensor, ...], softmax_scale: float, sum_over_ranks: SumOverRanks | None
) -> tuple[_Index, _Attention]:
    index_q, index_k, index_weights, q, kv, lse, starts, ends = tensors
    keys = KeyRows.ranges(starts, ends, len(index_k))
    attention = _Attention(
        q.contiguous(), kv.contiguous(), lse.contiguous(), softmax_scale, sum_over_ranks
    )
    return _index(index_q, index_k, index_weights, keys), attention


def _check_dtypes(one: Tensor, other: Tensor) -> None:
    if one.dtype != other.dtype or one.dtype not in FUSED_DTYPES:
        raise BackendError(
            "the triton backend does not compute the indexer's loss in these dtypes",
            got=f"{one.dtype} and {other.dtype}",
            expected=f"one dtype of {', '.join(map(str, FUSED_DTYPES))} for queries and keys",
            remedy='cast them, or use the backend "torch"',
        )
