"""Portable indexer: scores, their gradients, and a memory-bounded selection of keys."""

import torch
from torch import Tensor

from glm5.ops.indexer.inputs import check_index_inputs
from glm5.ops.indexer.selection import choose, pack_selection, select_from_scores
from glm5.ops.key_sets import KeyBounds, rows_per_chunk
from glm5.ops.precision import accumulation_dtype, no_autocast

__all__ = ["index_scores", "index_scores_backward", "select_from_scores", "select_topk"]

# Temporaries of scoring and choosing, in units of one score: two scores, their order keys, masks,
# the workspace of topk, and 64-bit slots; tests/ops/test_memory.py measures that it is enough.
_COPIES = 10


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Index scores I(t, s) = sum_h weights[t, h] relu(q[t, h] . k[s]) (arXiv 2512.02556, eq. 1).

    q [t_q, h_i, d_i], k [t_k, d_i] any float dtype, weights [t_q, h_i] fp32 with every scale
    folded in -> [t_q, t_k] fp32, computed in fp32 (fp64 for fp64 q). Differentiable.
    Heads are added one after the other, so that no [h_i, t_q, t_k] is made.
    """
    dtype = accumulation_dtype(q)
    with no_autocast(q):
        keys, weights = k.to(dtype).t(), weights.to(dtype)
        scores = torch.zeros(len(q), len(k), dtype=dtype, device=q.device)
        for head in range(q.shape[1]):
            similarity = torch.relu(q[:, head].to(dtype) @ keys)
            scores = scores.addcmul_(weights[:, head, None], similarity)
        return scores


def index_scores_backward(
    grad: Tensor, q: Tensor, k: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_scores in q, k and weights, one head at a time.

    grad [t_q, t_k], q [t_q, h_i, d_i], k [t_k, d_i], weights [t_q, h_i], all fp32 (or all fp64)
    -> gradients in the shapes and the dtype of q, k and weights.
    """
    grad_q, grad_k, grad_weights = map(torch.zeros_like, (q, k, weights))
    for head in range(q.shape[1]):
        similarity = torch.relu_(q[:, head] @ k.t())
        dead = similarity == 0
        grad_weights[:, head] = similarity.mul_(grad).sum(-1)
        grad_similarity = (grad * weights[:, head, None]).masked_fill_(dead, 0)
        grad_q[:, head] = grad_similarity @ k
        grad_k.addmm_(grad_similarity.t(), q[:, head])
    return grad_q, grad_k, grad_weights


@torch.no_grad()
def select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """Positions of the topk keys with the highest index scores among [starts, ends) of each row.

    q [t_q, h_i, d_i], k [t_k, d_i] any float dtype, weights [t_q, h_i] fp32, starts, ends [t_q]
    int32 -> topk_indices [t_q, topk] int32, ascending key position, -1 only at the tail.
    Exact and deterministic: select_from_scores states the rule for ties and NaN, and the same
    inputs give the same bits (a matmul may round otherwise when the rows are split differently).
    Rows with fewer than topk valid keys select them all; empty rows are all -1. Carries no
    gradient. Memory is bounded by a chunk of query rows; one host sync. Raises BackendError for
    inputs that do not fit and for bounds outside the keys.
    """
    check_index_inputs(q, k, weights, starts, ends, topk)
    bounds = KeyBounds(starts, ends)
    element_size = accumulation_dtype(q).itemsize
    num_rows = rows_per_chunk(len(k) * _COPIES * element_size)
    topk_indices = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    for chunk in bounds.chunks(len(k), num_rows):
        rows, keys = chunk
        chosen = bounds.mask(chunk)
        # A row cannot have more valid keys than its chunk spans: then all of them are selected.
        if keys.stop - keys.start > topk:
            chosen = choose(index_scores(q[rows], k[keys], weights[rows]), chosen, topk)
        local = pack_selection(chosen, topk)
        topk_indices[rows] = torch.where(local >= 0, local + keys.start, local)
    return topk_indices
