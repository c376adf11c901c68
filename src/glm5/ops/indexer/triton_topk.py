"""Exact top-k of score rows: narrow a long row to candidates, find the k-th key, list the best."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.indexer.triton_narrow import narrow
from glm5.ops.indexer.triton_search import NONE, extremes, kth_key, normal_fit, order_keys

# Candidates of one row, 32 a thread; a row of at most so many keys needs no narrowing.
_MIN_CAPACITY, _MAX_CAPACITY = 4096, 16384
_KEYS_PER_THREAD = 32
# Four programs of four warps fit on a processor.
_MAX_REGISTERS = 128
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _list_keys(
    out_ptr, keys, positions, threshold, num_above, num_tied, room
):  # fmt: skip
    """Store the selected positions of one tile, ascending; returns the counts so far."""
    above, tied = (keys > threshold).to(tl.int32), (keys == threshold).to(tl.int32)
    # Two prefix sums in one: neither exceeds the tile's size, at most 2**15.
    packed = tl.cumsum((above << 16) | tied, axis=0)
    above_rank, tied_rank = num_above + (packed >> 16), num_tied + (packed & 0xFFFF)
    chosen = (above == 1) | ((tied == 1) & (tied_rank <= room))
    slots = above_rank + tl.minimum(tied_rank, room) - 1
    tl.store(out_ptr + slots, positions, mask=chosen)
    return num_above + tl.sum(above), num_tied + tl.sum(tied)


@triton.jit
def _list_tied_row(
    row_ptr, out_ptr, start, end, threshold, room, TILE: tl.constexpr
):  # fmt: skip
    num_above, num_tied = 0, 0
    for offset in tl.range(start, end, TILE):
        columns = offset + tl.arange(0, TILE)
        valid = columns < end
        scores = tl.load(row_ptr + columns, mask=valid, other=0.0)
        keys = tl.where(valid, order_keys(scores), NONE)
        num_above, num_tied = _list_keys(
            out_ptr, keys, columns, threshold, num_above, num_tied, room
        )


@triton.jit
def _select_row(
    row_ptr, out_ptr, start, end, topk, candidates_ptr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    slots = tl.arange(0, CAPACITY)
    is_long = end - start > CAPACITY
    num_keys, guess, threshold, room = end - start, 0.0, 0, 0
    if is_long:
        num_keys, guess, threshold, room = narrow(
            row_ptr, start, end, topk, candidates_ptr, CAPACITY, TILE
        )
    if num_keys > CAPACITY:
        _list_tied_row(row_ptr, out_ptr, start, end, threshold, room, TILE)
    else:
        # The candidates are those of the filter, or the whole row.
        valid = slots < num_keys
        positions = start + slots
        if is_long:
            positions = tl.load(candidates_ptr + slots)
        scores = tl.load(row_ptr + positions, mask=valid, other=0.0)
        keys = tl.where(valid, order_keys(scores), NONE)
        low, high = extremes(keys)
        if not is_long:
            guess, _ = normal_fit(keys, num_keys, topk)
        threshold, room = kth_key(keys, num_keys, topk, 0, guess, low, high)
        _list_keys(out_ptr, keys, positions, threshold, 0, 0, room)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "topk"])
def _select_rows_kernel(
    scores_ptr, starts_ptr, ends_ptr, candidates_ptr, out_ptr,
    num_rows, num_keys, scores_stride, topk,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Candidates are kept by program, so that they stay in L2 however many rows there are.
    candidates_ptr += tl.program_id(0) * CAPACITY
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.maximum(tl.load(starts_ptr + row), 0)
        end = tl.minimum(tl.load(ends_ptr + row), num_keys)
        row_out_ptr = out_ptr + row * topk.to(tl.int64)
        if end - start <= topk:
            for offset in tl.range(0, topk, TILE):
                slots = offset + tl.arange(0, TILE)
                columns = tl.where(start + slots < end, start + slots, -1)
                tl.store(row_out_ptr + slots, columns, mask=slots < topk)
        else:
            row_ptr = scores_ptr + row * scores_stride.to(tl.int64)
            _select_row(row_ptr, row_out_ptr, start, end, topk, candidates_ptr, CAPACITY, TILE)
            # The next row overwrites the candidates.
            tl.debug_barrier()


def select_rows(
    scores: Tensor, num_keys: int, starts: Tensor, ends: Tensor, topk_indices: Tensor
) -> None:
    """Write the topk best keys of each score row: select_from_scores states the rule.

    scores [t_q or more, num_keys or more] fp32, rows 16-byte aligned, of which only the columns
    [starts, ends) count, starts, ends [t_q] int32 -> topk_indices [t_q, topk] int32, contiguous.
    A row with at most topk valid keys reads no score.
    """
    num_rows, topk = topk_indices.shape
    # Twice topk leaves room for a guess; more ties than that, or a larger topk, are read again.
    capacity = min(max(_MIN_CAPACITY, triton.next_power_of_2(2 * topk)), _MAX_CAPACITY)
    num_programs = min(num_rows, _PROGRAMS_PER_PROCESSOR * _num_processors(scores.device))
    candidates = topk_indices.new_empty(num_programs, capacity)
    _select_rows_kernel[(num_programs,)](
        scores, starts, ends, candidates, topk_indices,
        num_rows, num_keys, scores.stride(0), topk,
        CAPACITY=capacity, TILE=capacity // 4,
        num_warps=max(1, capacity // (32 * _KEYS_PER_THREAD)), maxnreg=_MAX_REGISTERS,
    )  # fmt: skip


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
