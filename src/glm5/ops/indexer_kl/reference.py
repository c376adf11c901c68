"""Portable KL losses between the attention and the indexer, chunked over query rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.indexer.reference import index_scores, index_scores_backward
from glm5.ops.indexer_kl.inputs import SumOverRanks, check_dense_inputs, check_sparse_inputs
from glm5.ops.key_sets import Chunk, KeyBounds, KeySelection, rows_per_chunk
from glm5.ops.precision import accumulation_dtype, no_autocast
from glm5.ops.sparse_mla.chunk import masked_logits, probabilities_


def indexer_kl(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, topk_indices: Tensor, mass: Tensor
) -> Tensor:
    """KL(p || softmax(index scores)) of each query row over its selected keys.

    (arXiv 2512.02556, eq. 4.) p is mass divided by its sum, mass as sparse_mla_with_mass returns it
    for topk_indices; where heads are split over ranks, summed over the ranks.
    index_q [t_q, h_i, d_i], index_k [t_k, d_i] any float dtype, index_weights [t_q, h_i] fp32,
    topk_indices [t_q, topk] int32, each key once, -1 = none; mass [t_q, topk] fp32, at least 0, and
    0 where there is no key -> kl [t_q] fp32 (fp64 for fp64 index_q). A row without a key gives 0.
    Differentiable in index_q, index_k and index_weights; mass is a constant.
    Memory is bounded by a chunk; one host sync per forward and per backward.
    Raises BackendError for inputs that do not fit, and for indices beyond index_k.
    """
    check_sparse_inputs(index_q, index_k, index_weights, topk_indices, mass)
    return _IndexerKlFunction.apply(
        _Selected, index_q, index_k, index_weights, topk_indices, mass.detach()
    )


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

    (arXiv 2512.02556, eq. 3: the dense warm-up.) p is the attention summed over the heads and
    divided by its sum. Index tensors as of indexer_kl; q [t_q, h, d_qk], kv [t_k, d_qk] any float
    dtype, lse [t_q, h] fp32 of the logits of the same keys, starts, ends [t_q] int32
    -> kl [t_q] fp32 (fp64 for fp64 index_q). A row without a key gives 0.
    Where heads are split over ranks, sum_over_ranks completes the sum over heads; it is called for
    each chunk, in both passes, and every rank must hold the same index tensors and bounds.
    Differentiable in index_q, index_k and index_weights; q, kv and lse are constants.
    Memory is bounded by a chunk; one host sync per forward and per backward.
    Raises BackendError for inputs that do not fit, and for bounds beyond the keys.
    """
    check_dense_inputs(index_q, index_k, index_weights, q, kv, lse, starts, ends)
    constants = (x.detach() for x in (q, kv, lse, starts, ends))
    target = partial(_AllInRange, softmax_scale, sum_over_ranks)
    return _IndexerKlFunction.apply(target, index_q, index_k, index_weights, *constants)


class _Target(Protocol):
    """What the indexer learns: the keys of each query, and the attention to them."""

    @property
    def keys(self) -> KeyBounds | KeySelection:
        """The keys of each query row."""

    def row_bytes(self, num_keys: int, itemsize: int) -> int:
        """Of the temporaries of mass, for a row."""

    def mass(self, chunk: Chunk, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The attention summed over the heads [rows, keys], 0 where mask is not set."""


class _Selected(NamedTuple):
    topk_indices: Tensor
    given: Tensor

    @property
    def keys(self) -> KeySelection:
        return KeySelection(self.topk_indices)

    def row_bytes(self, num_keys: int, itemsize: int) -> int:
        del num_keys, itemsize
        return 24 * self.topk_indices.shape[1]

    def mass(self, chunk: Chunk, mask: Tensor, dtype: torch.dtype) -> Tensor:
        del mask
        return self.keys.by_key(self.given[chunk.rows].to(dtype), chunk)


class _AllInRange(NamedTuple):
    softmax_scale: float
    sum_over_ranks: SumOverRanks | None
    q: Tensor
    kv: Tensor
    lse: Tensor
    starts: Tensor
    ends: Tensor

    @property
    def keys(self) -> KeyBounds:
        return KeyBounds(self.starts, self.ends)

    def row_bytes(self, num_keys: int, itemsize: int) -> int:
        h, d_qk = self.q.shape[1:]
        return (2 * h * num_keys + 4 * h * d_qk) * itemsize

    def mass(self, chunk: Chunk, mask: Tensor, dtype: torch.dtype) -> Tensor:
        rows, keys = chunk
        q_rows = self.q[rows].to(dtype) * self.softmax_scale
        logits = masked_logits(q_rows, self.kv[keys].to(dtype), mask)
        summed = probabilities_(logits, self.lse[rows].to(dtype)).sum(1)
        if self.sum_over_ranks is not None:
            self.sum_over_ranks(summed)
        return summed


class _IndexerKlFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        make_target: Callable[..., _Target],
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        *constants: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(index_q, index_k, index_weights, *constants)
        ctx.make_target = make_target
        inputs = _Inputs(make_target(*constants), index_q, index_k, index_weights)
        kl = inputs.index_q.new_zeros(len(index_q))
        with no_autocast(kl):
            for chunk in inputs.chunks():
                target, log_probs, _ = inputs.distributions(chunk)
                kl[chunk.rows] = (torch.xlogy(target, target) - target * log_probs).sum(-1)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        index_q, index_k, index_weights, *constants = ctx.saved_tensors
        with no_autocast(index_q):
            inputs = _Inputs(ctx.make_target(*constants), index_q, index_k, index_weights)
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
        return None, *grads, *[None] * len(constants)


class _Inputs:
    """The index tensors in the accumulation dtype, and the two distributions of a chunk."""

    def __init__(
        self, target: _Target, index_q: Tensor, index_k: Tensor, index_weights: Tensor
    ) -> None:
        dtype = accumulation_dtype(index_q)
        self.index_q, self.index_k = index_q.to(dtype), index_k.to(dtype)
        self.index_weights = index_weights.to(dtype)
        self.target = target

    def chunks(self) -> list[Chunk]:
        """Chunks whose target, mask and index scores stay within the budget."""
        num_keys, itemsize = len(self.index_k), self.index_k.itemsize
        bytes_per_row = 10 * num_keys * itemsize + self.target.row_bytes(num_keys, itemsize)
        return self.target.keys.chunks(num_keys, rows_per_chunk(bytes_per_row))

    def index_rows(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries [c, h_i, d_i], keys [n, d_i] and weights [c, h_i] of the chunk."""
        rows, keys = chunk
        return self.index_q[rows], self.index_k[keys], self.index_weights[rows]

    def distributions(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Attention p, log-softmax of the index scores (0 where masked), and the mask: [c, n]."""
        mask = self.target.keys.mask(chunk)
        mass = self.target.mass(chunk, mask, self.index_q.dtype)
        # A row without a key sums to 0 and stays 0.
        target = mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
        scores = index_scores(*self.index_rows(chunk)).masked_fill_(~mask, float("-inf"))
        return target, torch.log_softmax(scores, dim=-1).masked_fill_(~mask, 0), mask
