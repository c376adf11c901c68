"""Fused indexer: scores of a bounded block of query rows, then the exact selection of its keys."""

import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.indexer.shapes import check_shapes
from glm5.ops.indexer.triton_scores import index_scores_block
from glm5.ops.indexer.triton_topk import select_rows

__all__ = ["select_topk"]

# Budget for the scores of one block of query rows, whatever the sequence length.
_SCORE_BYTES = 256 * 2**20
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """Positions of the topk keys with the highest index scores among [starts, ends) of each row.

    q [t_q, h_i, d_i], k [t_k, d_i] bf16, fp16 or fp32, weights [t_q, h_i] fp32, starts, ends [t_q]
    int32 -> topk_indices [t_q, topk] int32, ascending key position, -1 only at the tail.
    Scores are computed in fp32; the selection is exact and deterministic, by the rule of
    select_from_scores. Rows with at most topk valid keys select them all and are not scored;
    empty rows are all -1. Carries no gradient. Memory is bounded by _SCORE_BYTES. No host sync:
    bounds outside the keys are cut to the keys. Raises BackendError for shapes that do not fit
    and for other dtypes.
    """
    check_shapes(q, k, weights, starts, ends, topk)
    _check_dtypes(q, k)
    t_q, t_k = len(q), len(k)
    topk_indices = torch.empty(t_q, topk, dtype=torch.int32, device=q.device)
    q, k, weights = q.contiguous(), k.contiguous(), weights.float().contiguous()
    starts, ends = starts.int().contiguous(), ends.int().contiguous()
    if topk_indices.numel() == 0:
        return topk_indices
    # Rows of whole 512-byte lines keep every load aligned, and the kernels free of recompilation.
    width = -(-max(1, t_k) // 128) * 128
    num_rows = max(1, min(t_q, _SCORE_BYTES // (4 * width)))
    scores = torch.empty(num_rows if t_k > topk else 0, width, device=q.device)
    for first in range(0, t_q, num_rows):
        rows = slice(first, first + num_rows)
        if t_k > topk:
            index_scores_block(q[rows], k, weights[rows], starts[rows], ends[rows], topk, scores)
        select_rows(scores, t_k, starts[rows], ends[rows], topk_indices[rows])
    return topk_indices


def _check_dtypes(q: Tensor, k: Tensor) -> None:
    if q.dtype != k.dtype or q.dtype not in _DTYPES:
        raise BackendError(
            "the triton indexer does not compute in this dtype",
            got=f"q {q.dtype}, k {k.dtype}",
            expected=f"one dtype of {', '.join(map(str, _DTYPES))}",
            remedy="cast q and k, or use the torch backend",
        )
