"""Index scores of a block of query rows, written only where a selection has to be made."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# Scores of one program's tile are [keys, queries * heads]: heads lie within a thread, so that
# their sum needs two shuffles instead of a trip through shared memory.
_TILE_COLUMNS = 256
_TILE_DIMS = 128
_KEYS_PER_PROGRAM = 1024


@triton.jit
def _scored_range(starts_ptr, ends_ptr, rows, num_rows, num_keys, topk):
    """First and last key that a row of this block needs scored; empty when no row does."""
    starts = tl.maximum(tl.load(starts_ptr + rows, mask=rows < num_rows, other=0), 0)
    ends = tl.minimum(tl.load(ends_ptr + rows, mask=rows < num_rows, other=0), num_keys)
    scored = ends - starts > topk
    return tl.min(tl.where(scored, starts, num_keys)), tl.max(tl.where(scored, ends, 0))


@triton.jit
def _load_queries(
    q_ptr, rows, dims, num_rows, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Transposed queries [dims, queries * heads]; heads are padded to BLOCK_H with zeros."""
    heads = tl.arange(0, BLOCK_H)
    columns = rows.to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
    inside = (rows < num_rows)[:, None] & (heads < NUM_HEADS)[None, :]
    size: tl.constexpr = rows.shape[0] * BLOCK_H
    columns, inside = tl.reshape(columns, [size]), tl.reshape(inside, [size])
    mask = (dims < HEAD_DIM)[:, None] & inside[None, :]
    return tl.load(q_ptr + columns[None, :] * HEAD_DIM + dims[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "topk"])
def _index_scores_kernel(
    q_ptr, k_ptr, weights_ptr, starts_ptr, ends_ptr, scores_ptr,
    num_rows, num_keys, scores_stride, topk,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    low, high = _scored_range(starts_ptr, ends_ptr, rows, num_rows, num_keys, topk)
    first = tl.maximum(low // BLOCK_K * BLOCK_K, tl.program_id(1) * KEYS_PER_PROGRAM)
    last = tl.minimum(high, (tl.program_id(1) + 1) * KEYS_PER_PROGRAM)
    if first >= last:
        return
    heads = tl.arange(0, BLOCK_H)
    weights = tl.load(
        weights_ptr + rows[:, None] * NUM_HEADS + heads[None, :],
        mask=(rows < num_rows)[:, None] & (heads < NUM_HEADS)[None, :],
        other=0.0,
    )
    weights = tl.reshape(weights, [1, BLOCK_Q * BLOCK_H])
    dims = tl.arange(0, BLOCK_D)
    q = _load_queries(q_ptr, rows, dims, num_rows, NUM_HEADS, HEAD_DIM, BLOCK_H)
    row_ptrs = scores_ptr + rows.to(tl.int64) * scores_stride
    for key in tl.range(first, last, BLOCK_K):
        keys = key + tl.arange(0, BLOCK_K)
        similarity = tl.zeros([BLOCK_K, BLOCK_Q * BLOCK_H], dtype=tl.float32)
        for dim in tl.static_range(0, HEAD_DIM, BLOCK_D):
            # Queries stay on chip unless they are too wide.
            if HEAD_DIM > BLOCK_D:
                q = _load_queries(q_ptr, rows, dim + dims, num_rows, NUM_HEADS, HEAD_DIM, BLOCK_H)
            k = tl.load(
                k_ptr + keys.to(tl.int64)[:, None] * HEAD_DIM + (dim + dims)[None, :],
                mask=(keys < num_keys)[:, None] & (dim + dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            similarity = tl.dot(k, q, similarity, input_precision="ieee")
        # A NaN has to reach the selection, which ranks it highest.
        similarity = tl.maximum(similarity, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights
        scores = tl.sum(tl.reshape(similarity, [BLOCK_K, BLOCK_Q, BLOCK_H]), axis=2)
        inside = (keys < last)[:, None] & (rows < num_rows)[None, :]
        tl.store(row_ptrs[None, :] + keys[:, None], scores, mask=inside)


def portable_scorer(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, num_rows: int
) -> Callable[[int, Tensor], None]:
    """A function that writes the index scores of a chunk of num_rows query rows.

    q [t_q, h_i, d_i], k [t_k, d_i] bf16, fp16 or fp32, weights [t_q, h_i] fp32, starts, ends [t_q]
    int32, all contiguous. The function takes the chunk's number and scores [num_rows or more, t_k
    or more] fp32, and writes each score at the column of its key. A row with at most topk valid
    keys is not scored, and columns outside the range of a row's block are left as they were.
    """

    def score_chunk(chunk: int, scores: Tensor) -> None:
        rows = slice(chunk * num_rows, (chunk + 1) * num_rows)
        _index_scores(q[rows], k, weights[rows], starts[rows], ends[rows], topk, scores)

    return score_chunk


def _index_scores(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, scores: Tensor
) -> None:
    t_q, num_heads, head_dim = q.shape
    block_h = triton.next_power_of_2(num_heads)
    # An fp32 dot lives in registers, and heads wider than a tile are loaded again for each key
    # tile: both need a small tile to fit.
    exact, wide = q.dtype == torch.float32, head_dim > _TILE_DIMS
    block_q = max(1, (64 if exact or wide else _TILE_COLUMNS) // block_h)
    block_h = max(block_h, 16 // block_q)
    grid = (triton.cdiv(t_q, block_q), triton.cdiv(len(k), _KEYS_PER_PROGRAM))
    _index_scores_kernel[grid](
        q, k, weights, starts, ends, scores,
        t_q, len(k), scores.stride(0), topk,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        BLOCK_Q=block_q, BLOCK_H=block_h, BLOCK_K=32 if exact else 64,
        BLOCK_D=min(_TILE_DIMS, max(16, triton.next_power_of_2(head_dim))),
        KEYS_PER_PROGRAM=_KEYS_PER_PROGRAM,
        num_warps=4, num_stages=1 if wide else 2,
    )  # fmt: skip
