"""indexer_kl of the backend "triton": autograd around the fused kernels."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.errors import BackendError
from glm5.ops.indexer_kl.inputs import SumOverRanks, check_inputs, check_key_set
from glm5.ops.indexer_kl.triton_divergence import divergence
from glm5.ops.indexer_kl.triton_grads import score_grads
from glm5.ops.indexer_kl.triton_keys import FUSED_DTYPES, KeyRows
from glm5.ops.indexer_kl.triton_mass import attention_mass

# Budget for one value per query and key of a block of query rows, whatever the sequence length.
_SCRATCH_BYTES = 128 * 2**20


def indexer_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    softmax_scale: float,
    *,
    topk_indices: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """KL(p || softmax(index scores)) of each query row (arXiv 2512.02556, eq. 3 and 4).

    The contract is that of the reference, for bf16, fp16 and fp32: p is the attention summed over
    the heads and divided by its sum, over topk_indices (sparse form) or over [starts, ends).
    index_q [t_q, h_i, d_i], index_k [t_k, d_i] one dtype, index_weights [t_q, h_i] fp32,
    q [t_q, h, d_qk], kv [t_k, d_qk] one dtype, lse [t_q, h] fp32 as sparse_mla returns it for the
    same keys, topk_indices [t_q, topk] int32, starts, ends [t_q] int32 -> kl [t_q] fp32.
    Products take the inputs' dtype and are summed in fp32; the gradient of index_k is summed by
    atomics, so its last bits change from run to run. The sparse form keeps one fp32 value per
    selected key for the backward; the dense form computes a block of rows again. sum_over_ranks is
    called for each block: in the forward, and in the backward of the dense form. No host sync;
    bounds are cut to the keys, indices beyond the keys are not checked.
    Raises BackendError for key sets, shapes and dtypes that do not fit.
    """
    check_inputs(index_q, index_k, index_weights, q, kv, lse)
    check_key_set(topk_indices, starts, ends, t_q=len(q))
    _check_dtypes(index_q, index_k, q, kv)
    tensors = (index_q, index_k, index_weights, q, kv, lse, topk_indices, starts, ends)
    return _IndexerKlFunction.apply(softmax_scale, sum_over_ranks, *tensors)


class _Attention(NamedTuple):
    """What tells the attention's probabilities: q, kv and lse, contiguous."""

    q: Tensor
    kv: Tensor
    lse: Tensor
    softmax_scale: float
    sum_over_ranks: SumOverRanks | None

    def write_mass(self, block: slice, keys: KeyRows, mass: Tensor) -> None:
        """mass [rows, width] fp32: the probabilities of the block's keys, summed over all heads."""
        attention_mass(self.q[block], self.kv, self.lse[block], keys, self.softmax_scale, mass)
        if self.sum_over_ranks is not None:
            self.sum_over_ranks(mass)


class _Index(NamedTuple):
    """The index tensors, contiguous, and the keys of each query."""

    q: Tensor
    k: Tensor
    weights: Tensor
    keys: KeyRows

    @classmethod
    def of(cls, q: Tensor, k: Tensor, weights: Tensor, *key_tensors: Tensor | None) -> Self:
        topk_indices, starts, ends = key_tensors
        if topk_indices is not None:
            keys = KeyRows.listed(topk_indices)
        else:
            assert starts is not None and ends is not None, "check_key_set saw neither key set"
            keys = KeyRows.ranges(starts, ends, len(k))
        return cls(q.contiguous(), k.contiguous(), weights.float().contiguous(), keys)

    def blocks(self) -> Iterator[slice]:
        """Slices of query rows whose scratch is bounded."""
        num_rows = max(1, _SCRATCH_BYTES // max(1, 4 * self.keys.width))
        for first in range(0, len(self.q), num_rows):
            yield slice(first, min(first + num_rows, len(self.q)))

    def scratch(self, block: slice) -> Tensor:
        """[rows, width] fp32, not filled."""
        return self.weights.new_empty(block.stop - block.start, self.keys.width)

    def rows(self, block: slice) -> tuple[Tensor, Tensor, Tensor, KeyRows]:
        """Queries, all keys, weights and key places of the block."""
        return self.q[block], self.k, self.weights[block], self.keys.rows(block)

    def divergence(
        self, block: slice, attention: _Attention, grad_scores: Tensor, kl: Tensor
    ) -> None:
        """Writes kl [rows] and its gradient in the index scores [rows, width]."""
        attention.write_mass(block, self.keys.rows(block), grad_scores)
        divergence(*self.rows(block), grad_scores, self.scratch(block), kl)


class _IndexerKlFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        softmax_scale: float,
        sum_over_ranks: SumOverRanks | None,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        q: Tensor,
        kv: Tensor,
        lse: Tensor,
        *key_tensors: Tensor | None,
    ) -> Tensor:
        index = _Index.of(index_q, index_k, index_weights, *key_tensors)
        attention = _Attention(
            q.contiguous(), kv.contiguous(), lse.contiguous(), softmax_scale, sum_over_ranks
        )
        kl = index.weights.new_empty(len(q))
        # The sparse form keeps its gradient in the scores, the dense one what it follows from.
        is_sparse = index.keys.indices is not None
        kept = index.scratch(slice(0, len(q))) if is_sparse else None
        for block in index.blocks():
            grad_scores = index.scratch(block) if kept is None else kept[block]
            index.divergence(block, attention, grad_scores, kl[block])
        rest = (kept, None, None) if is_sparse else (attention.q, attention.kv, attention.lse)
        ctx.save_for_backward(index_q, index_k, index_weights, *key_tensors, *rest)
        ctx.is_sparse, ctx.rest = is_sparse, (softmax_scale, sum_over_ranks)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        *index_tensors, kept_or_q, kv, lse = ctx.saved_tensors
        index, grad_kl = _Index.of(*index_tensors), grad_kl.contiguous()
        grad_q, grad_weights = torch.empty_like(index.q), torch.empty_like(index.weights)
        grad_k = torch.zeros_like(index.k, dtype=torch.float32)
        for block in index.blocks():
            if ctx.is_sparse:
                grad_scores = kept_or_q[block]
            else:
                grad_scores = index.scratch(block)
                attention = _Attention(kept_or_q, kv, lse, *ctx.rest)
                index.divergence(block, attention, grad_scores, torch.empty_like(grad_kl[block]))
            score_grads(
                grad_scores, grad_kl[block], *index.rows(block),
                grad_q[block], grad_k, grad_weights[block],
            )  # fmt: skip
        grads = grad_q, grad_k.to(grad_q.dtype), grad_weights.to(index_tensors[2].dtype)
        return None, None, *grads, *[None] * 6


def _check_dtypes(index_q: Tensor, index_k: Tensor, q: Tensor, kv: Tensor) -> None:
    pairs = [(x.dtype, y.dtype) for x, y in ((index_q, index_k), (q, kv))]
    if any(x != y or x not in FUSED_DTYPES for x, y in pairs):
        raise BackendError(
            "the triton backend does not compute the indexer's loss in these dtypes",
            got=f"index_q and index_k {pairs[0]}, q and kv {pairs[1]}",
            expected=f"one dtype of {', '.join(map(str, FUSED_DTYPES))} for each pair",
            remedy='cast them, or use the backend "torch"',
        )
