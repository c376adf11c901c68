"""Portable KL loss between the attention and the indexer, chunked over query rows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.indexer.reference import index_scores, index_scores_backward
from glm5.ops.indexer_kl.inputs import SumOverRanks, check_inputs, check_key_set
from glm5.ops.key_sets import Chunk, KeyBounds, KeySelection, rows_per_chunk
from glm5.ops.precision import accumulation_dtype, no_autocast
from glm5.ops.sparse_mla.chunk import masked_logits, probabilities_


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

    p is the attention summed over the heads and divided by its sum. Both distributions run over
    topk_indices (sparse form) or over all keys in [starts, ends) (dense warm-up); give one of them.
    index_q [t_q, h_i, d_i], index_k [t_k, d_i] any float dtype, index_weights [t_q, h_i] fp32,
    q [t_q, h, d_qk], kv [t_k, d_qk] any float dtype, topk_indices [t_q, topk] int32,
    starts, ends [t_q] int32; lse [t_q, h] fp32 as sparse_mla returns it for the same keys.
    -> kl [t_q] fp32 (fp64 for fp64 index_q). A row without a key gives 0.
    Where heads are split over ranks, sum_over_ranks completes the sum over heads; it is called for
    each chunk, in both passes, and every rank must hold the same index tensors and key set.
    Differentiable in index_q, index_k and index_weights; q, kv and lse are constants.
    Memory is bounded by a chunk; one host sync per forward and per backward.
    Raises BackendError when not exactly one key set is given, or when the shapes do not fit.
    """
    check_inputs(index_q, index_k, index_weights, q, kv, lse)
    check_key_set(topk_indices, starts, ends, t_q=len(q))
    tensors = (index_q, index_k, index_weights, q, kv, lse, topk_indices, starts, ends)
    return _IndexerKlFunction.apply(softmax_scale, sum_over_ranks, *tensors)


class _IndexerKlFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        softmax_scale: float,
        sum_over_ranks: SumOverRanks | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.softmax_scale, ctx.sum_over_ranks = softmax_scale, sum_over_ranks
        inputs = _Inputs(tensors, softmax_scale, sum_over_ranks)
        kl = inputs.kv.new_zeros(len(inputs.q))
        with no_autocast(kl):
            for chunk in inputs.chunks():
                target, log_probs, _ = inputs.distributions(chunk)
                kl[chunk.rows] = (torch.xlogy(target, target) - target * log_probs).sum(-1)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        index_q, index_k, index_weights, *_ = ctx.saved_tensors
        with no_autocast(index_q):
            inputs = _Inputs(ctx.saved_tensors, ctx.softmax_scale, ctx.sum_over_ranks)
            grad_q, grad_k, grad_weights = map(
                torch.zeros_like, (inputs.index_q, inputs.index_k, inputs.index_weights)
            )
            for chunk in inputs.chunks():
                rows, keys = chunk
                target, log_probs, mask = inputs.distributions(chunk)
                grad_scores = log_probs.exp_().sub_(target).mul_(grad_kl[rows, None])
                grad_q[rows], grad_k_keys, grad_weights[rows] = index_scores_backward(
                    grad_scores.masked_fill_(~mask, 0), *inputs.index_rows(chunk)
                )
                grad_k[keys] += grad_k_keys
        grads = grad_q.to(index_q), grad_k.to(index_k), grad_weights.to(index_weights)
        return None, None, *grads, *[None] * 6


class _Inputs:
    """The tensors in the accumulation dtype, and the two distributions of a chunk."""

    def __init__(
        self,
        tensors: tuple[Any, ...],
        softmax_scale: float,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        index_q, index_k, index_weights, q, kv, lse, *key_tensors = tensors
        dtype = accumulation_dtype(index_q)
        self.index_q, self.index_k = index_q.to(dtype), index_k.to(dtype)
        self.index_weights = index_weights.to(dtype)
        self.q, self.kv, self.lse = q, kv.to(dtype), lse
        self.softmax_scale, self.sum_over_ranks = softmax_scale, sum_over_ranks
        self.key_set = _key_set(*key_tensors)

    def chunks(self) -> list[Chunk]:
        """Chunks whose logits, mask and index scores stay within the budget."""
        h, d_qk = self.q.shape[1:]
        topk = self.key_set.topk_indices.shape[1] if isinstance(self.key_set, KeySelection) else 0
        copies_of_a_score = 2 * h + 10
        bytes_per_row = (copies_of_a_score * len(self.kv) + 4 * h * d_qk) * self.kv.itemsize
        return self.key_set.chunks(len(self.kv), rows_per_chunk(bytes_per_row + 24 * topk))

    def index_rows(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries [c, h_i, d_i], keys [n, d_i] and weights [c, h_i] of the chunk."""
        rows, keys = chunk
        return self.index_q[rows], self.index_k[keys], self.index_weights[rows]

    def distributions(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Attention p, log-softmax of the index scores (0 where masked), and the mask: [c, n]."""
        mask = self.key_set.mask(chunk)
        target = self._attention(chunk, mask)
        scores = index_scores(*self.index_rows(chunk)).masked_fill_(~mask, float("-inf"))
        return target, torch.log_softmax(scores, dim=-1).masked_fill_(~mask, 0), mask

    def _attention(self, chunk: Chunk, mask: Tensor) -> Tensor:
        rows, keys = chunk
        q_rows = self.q[rows].to(self.kv.dtype) * self.softmax_scale
        logits = masked_logits(q_rows, self.kv[keys], mask)
        summed = probabilities_(logits, self.lse[rows].to(logits.dtype)).sum(1)
        if self.sum_over_ranks is not None:
            self.sum_over_ranks(summed)
        # A row without a key sums to 0 and stays 0.
        return summed / summed.sum(-1, keepdim=True).clamp_min(torch.finfo(summed.dtype).tiny)


def _key_set(
    topk_indices: Tensor | None, starts: Tensor | None, ends: Tensor | None
) -> KeyBounds | KeySelection:
    if topk_indices is not None:
        return KeySelection(topk_indices)
    assert starts is not None and ends is not None, "check_key_set saw neither key set"
    return KeyBounds(starts, ends)
