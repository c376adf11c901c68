"""Fused indexer: scores of a bounded block of query rows, then the exact selection of its keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.indexer.gluon_scores import MAX_ROWS, fits_hopper, hopper_scorer
from glm5.ops.indexer.inputs import check_index_inputs
from glm5.ops.indexer.triton_scores import portable_scorer
from glm5.ops.indexer.triton_topk import select_rows

__all__ = ["select_topk"]

# Budget for the scores of one block of query rows, whatever the sequence length.
_SCORE_BYTES = 256 * 2**20
_HOPPER_ROWS = 128
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
    bounds outside the keys are cut to the keys. Raises BackendError for inputs that do not fit
    and for other dtypes.
    """
    check_index_inputs(q, k, weights, starts, ends, topk)
    _check_dtypes(q, k)
    t_q, t_k = len(q), len(k)
    topk_indices = torch.empty(t_q, topk, dtype=torch.int32, device=q.device)
    q, k, weights = q.contiguous(), k.contiguous(), weights.float().contiguous()
    starts, ends = starts.int().contiguous(), ends.int().contiguous()
    if topk_indices.numel() == 0:
        return topk_indices
    if t_k <= topk:
        select_rows(weights, t_k, starts, ends, topk_indices)
        return topk_indices
    num_rows, width = chunk_shape(q, k)
    score_chunk = chunk_scorer(q, k, weights, starts, ends, topk, num_rows)
    scores = torch.empty(num_rows, width, device=q.device)
    for chunk, first in enumerate(range(0, t_q, num_rows)):
        rows = slice(first, first + num_rows)
        score_chunk(chunk, scores)
        select_rows(scores, t_k, starts[rows], ends[rows], topk_indices[rows])
    return topk_indices


def chunk_scorer(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, num_rows: int
) -> Callable[[int, Tensor], None]:
    """The fastest scorer of this device and this shape: see portable_scorer."""
    make_scorer = hopper_scorer if fits_hopper(q) else portable_scorer
    return make_scorer(q, k, weights, starts, ends, topk, num_rows)


def chunk_shape(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Number of query rows that are scored at a time, and the padded length of a score row."""
    # Rows of whole 512-byte lines keep every load aligned, and the kernels free of recompilation.
    width = -(-len(k) // 128) * 128
    row_unit = _HOPPER_ROWS if fits_hopper(q) else 1
    num_units = min(MAX_ROWS, _SCORE_BYTES // (4 * width)) // row_unit
    return row_unit * max(1, min(num_units, -(-len(q) // row_unit))), width


def _check_dtypes(q: Tensor, k: Tensor) -> None:
    if q.dtype != k.dtype or q.dtype not in _DTYPES:
        raise BackendError(
            "the triton indexer does not compute in this dtype",
            got=f"q {q.dtype}, k {k.dtype}",
            expected=f"one dtype of {', '.join(map(str, _DTYPES))}",
            remedy="cast q and k, or use the torch backend",
        )
