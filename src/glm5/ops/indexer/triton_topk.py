"""Exact top-k of score rows: search the k-th score by counting, then list the keys above it.

Scores are compared as integers in the order of select_from_scores, so ties stay exact and NaN
ranks highest. The search keeps a bracket of the k-th key and guesses inside it from the counts at
its ends; every third step bisects, so that a bad guess costs a constant factor and no more.
"""

import triton
import triton.language as tl
from torch import Tensor

_LOWEST: tl.constexpr = tl.constexpr(-(2**31))
_HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)
# The longest row that stays in registers, 32 a thread; longer rows are read again for each count.
_RESIDENT_KEYS = 32768
_SMALLEST = 4096


@triton.jit
def _order_keys(scores):
    bits = scores.to(tl.int32, bitcast=True)
    # Negative floats are sign and magnitude: flipping the magnitude makes their bits ascend.
    keys = tl.where(bits < 0, bits ^ _HIGHEST, bits)
    # -0.0 equals 0.0, and NaN is above every number.
    return tl.where(scores != scores, _HIGHEST, tl.where(scores == 0.0, 0, keys))


@triton.jit
def _value_of(key):
    return tl.where(key < 0, key ^ _HIGHEST, key).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(row_ptr, offset, start, end, BLOCK: tl.constexpr):
    """Order keys of the scores at [offset, offset + BLOCK); outside [start, end) the lowest."""
    columns = offset + tl.arange(0, BLOCK)
    valid = (columns >= start) & (columns < end)
    scores = tl.load(row_ptr + columns, mask=valid, other=0.0)
    return tl.where(valid, _order_keys(scores), _LOWEST)


@triton.jit
def _count(keys, pivot, row_ptr, first, start, end, BLOCK: tl.constexpr, RESIDENT: tl.constexpr):
    """Number of valid keys that are at least pivot, and pivot is above the lowest."""
    if RESIDENT:
        return tl.sum((keys >= pivot).to(tl.int32))
    total = 0
    for offset in tl.range(first, end, BLOCK):
        keys = _load_keys(row_ptr, offset, start, end, BLOCK)
        total += tl.sum((keys >= pivot).to(tl.int32))
    return total


@triton.jit
def _add_statistics(keys, low, high, total, squares):
    valid = keys != _LOWEST
    values = tl.where(valid, _value_of(keys), 0.0)
    low = tl.minimum(low, tl.min(tl.where(valid, keys, _HIGHEST)))
    high = tl.maximum(high, tl.max(keys))
    return low, high, total + tl.sum(values), squares + tl.sum(values * values)


@triton.jit
def _normal_guess(mean, deviation, fraction):
    """The score that a fraction of normally distributed scores exceeds (rational approximation)."""
    tail = tl.minimum(fraction, 1.0 - fraction)
    t = tl.sqrt(-2.0 * tl.log(tl.maximum(tail, 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return mean + deviation * tl.where(fraction > 0.5, -z, z)


@triton.jit
def _kth_key(
    keys, row_ptr, first, start, end, topk, BLOCK: tl.constexpr, RESIDENT: tl.constexpr
):  # fmt: skip
    """Threshold of the selection: keys above it are fewer than topk, keys from it on are not.

    Where exactly topk keys are at least the threshold, it may be any such key.
    """
    low, high = tl.full([], _HIGHEST, tl.int32), tl.full([], _LOWEST, tl.int32)
    total, squares = 0.0, 0.0
    if RESIDENT:
        low, high, total, squares = _add_statistics(keys, low, high, total, squares)
    else:
        for offset in tl.range(first, end, BLOCK):
            keys = _load_keys(row_ptr, offset, start, end, BLOCK)
            low, high, total, squares = _add_statistics(keys, low, high, total, squares)
    num_keys = end - start
    num_low, num_high = num_keys, _count(
        keys, high, row_ptr, first, start, end, BLOCK, RESIDENT
    )  # fmt: skip
    if num_high >= topk:
        low, num_low = high, num_high
    mean = total / num_keys
    deviation = tl.sqrt(tl.maximum(squares / num_keys - mean * mean, 0.0))
    pivot = _order_keys(_normal_guess(mean, deviation, topk / num_keys))
    step = 0
    # Neighbouring keys, or exactly topk keys from low on, end the search.
    while (num_low != topk) & (low < high - (low < high).to(tl.int32)):
        pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
        num_pivot = _count(keys, pivot, row_ptr, first, start, end, BLOCK, RESIDENT)
        if num_pivot >= topk:
            low, num_low = pivot, num_pivot
        else:
            high, num_high = pivot, num_pivot
        pivot = _next_pivot(low, high, num_low, num_high, topk, step)
        step += 1
    return low


@triton.jit
def _next_pivot(low, high, num_low, num_high, topk, step):
    log_low = tl.log(num_low.to(tl.float32))
    log_high = tl.log(tl.maximum(num_high.to(tl.float32), 0.5))
    part = (log_low - tl.log(topk.to(tl.float32) + 0.5)) / (log_low - log_high)
    low_value, high_value = _value_of(low), _value_of(high)
    guess = _order_keys(low_value + part * (high_value - low_value))
    # The mean without overflow.
    middle = (low & high) + ((low ^ high) >> 1)
    return tl.where(step % 3 == 2, middle, guess)


@triton.jit
def _list_keys(
    out_ptr, keys, threshold, offset, num_above, num_tied, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the selected columns of one tile, ascending; returns the counts so far."""
    above, tied = (keys > threshold).to(tl.int32), (keys == threshold).to(tl.int32)
    # Two prefix sums in one: neither exceeds BLOCK <= 2**15.
    packed = tl.cumsum((above << 16) | tied, axis=0)
    above_rank, tied_rank = num_above + (packed >> 16), num_tied + (packed & 0xFFFF)
    chosen = (above == 1) | ((tied == 1) & (tied_rank <= room))
    slots = above_rank + tl.minimum(tied_rank, room) - 1
    tl.store(out_ptr + slots, offset + tl.arange(0, BLOCK), mask=chosen)
    return num_above + tl.sum(above), num_tied + tl.sum(tied)


@triton.jit
def _select_row(
    row_ptr, out_ptr, first, start, end, topk, BLOCK: tl.constexpr, RESIDENT: tl.constexpr
):  # fmt: skip
    keys = _load_keys(row_ptr, first, start, end, BLOCK)
    threshold = _kth_key(keys, row_ptr, first, start, end, topk, BLOCK, RESIDENT)
    num_above = 0
    if threshold != _HIGHEST:
        num_above = _count(keys, threshold + 1, row_ptr, first, start, end, BLOCK, RESIDENT)
    room = topk - num_above
    if RESIDENT:
        _list_keys(out_ptr, keys, threshold, first, 0, 0, room, BLOCK)
    else:
        num_above, num_tied = 0, 0
        for offset in tl.range(first, end, BLOCK):
            keys = _load_keys(row_ptr, offset, start, end, BLOCK)
            num_above, num_tied = _list_keys(
                out_ptr, keys, threshold, offset, num_above, num_tied, room, BLOCK
            )


@triton.jit(do_not_specialize=["num_keys", "topk"])
def _select_rows_kernel(
    scores_ptr, starts_ptr, ends_ptr, out_ptr, num_keys, scores_stride, topk,
    SMALLEST: tl.constexpr, NUM_SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.maximum(tl.load(starts_ptr + row), 0)
    end = tl.minimum(tl.load(ends_ptr + row), num_keys)
    row_ptr = scores_ptr + row.to(tl.int64) * scores_stride
    out_ptr += row.to(tl.int64) * topk
    if end - start <= topk:
        for offset in tl.range(0, topk, BLOCK):
            slots = offset + tl.arange(0, BLOCK)
            columns = tl.where(start + slots < end, start + slots, -1)
            tl.store(out_ptr + slots, columns, mask=slots < topk)
        return
    # Aligned for wide loads.
    first = start // 4 * 4
    span = end - first
    # A short row does not pay for the longest one: each power of two has code of its own.
    for i in tl.static_range(NUM_SIZES):
        if (span <= SMALLEST << i) & ((span > SMALLEST << i >> 1) | (i == 0)):
            _select_row(row_ptr, out_ptr, first, start, end, topk, SMALLEST << i, True)
    if span > SMALLEST << (NUM_SIZES - 1):
        _select_row(row_ptr, out_ptr, first, start, end, topk, BLOCK, False)


def select_rows(
    scores: Tensor, num_keys: int, starts: Tensor, ends: Tensor, topk_indices: Tensor
) -> None:
    """Write the topk best keys of each score row: select_from_scores states the rule.

    scores [t_q or more, num_keys or more] fp32, rows 16-byte aligned, of which only the columns
    [starts, ends) count, starts, ends [t_q] int32 -> topk_indices [t_q, topk] int32, contiguous.
    A row with at most topk valid keys reads no score.
    """
    smallest = min(_SMALLEST, _RESIDENT_KEYS)
    longest = min(_RESIDENT_KEYS, max(smallest, triton.next_power_of_2(num_keys)))
    _select_rows_kernel[(len(topk_indices),)](
        scores, starts, ends, topk_indices,
        num_keys, scores.stride(0), topk_indices.shape[1],
        SMALLEST=smallest, NUM_SIZES=(longest // smallest).bit_length(), BLOCK=smallest,
        num_warps=max(4, longest // 1024),
    )  # fmt: skip
