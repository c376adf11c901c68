"""Exact top-k of score rows: narrow a row to a few candidates, then search those by counting.

Scores are compared as integers in the order of select_from_scores, so ties stay exact and NaN
ranks highest. A search keeps a bracket of the k-th key and guesses inside it from the counts at its
ends; some steps bisect, so that bad guesses cost a constant factor and no more. A row that
is too long for the registers is read once in the common case: the sample's k-th score, lowered by
a margin, leaves between topk and CAPACITY candidates. Where it does not, the search narrows on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Order keys of "no key here", -infinity, and NaN, which is just above infinity.
_NONE = tl.constexpr(-(2**31))
_MINUS_INFINITY = tl.constexpr(-(2**31) + 0x7FFFFF)
_NAN = tl.constexpr(0x7F800001)
_MAGNITUDE = tl.constexpr(2**31 - 1)
_UNLIMITED = tl.constexpr(2**30)
# Candidates of one row, 32 a thread; a row of at most so many keys needs no narrowing.
_MIN_CAPACITY, _MAX_CAPACITY = 4096, 16384
_KEYS_PER_THREAD = 32
# Four programs of four warps fit on a processor.
_MAX_REGISTERS = 128
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _order_keys(scores):
    bits = scores.to(tl.int32, bitcast=True)
    # Negative floats are sign and magnitude: flipping the magnitude makes their bits ascend.
    keys = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    # -0.0 equals 0.0, and NaN is above every number.
    return tl.where(scores != scores, _NAN, tl.where(scores == 0.0, 0, keys))


@triton.jit
def _value_of(key):
    return tl.where(key < 0, key ^ _MAGNITUDE, key).to(tl.float32, bitcast=True)


@triton.jit
def _normal_fit(keys, num_keys, topk):
    """The score that topk of num_keys normally distributed scores reach, and its density."""
    values = tl.where(keys != _NONE, _value_of(keys), 0.0)
    mean = tl.sum(values) / num_keys
    deviation = tl.sqrt(tl.maximum(tl.sum(values * values) / num_keys - mean * mean, 0.0))
    fraction = topk / num_keys
    # Rational approximation of the normal quantile (Abramowitz and Stegun, 26.2.22).
    t = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(fraction, 1.0 - fraction), 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    density = 0.39894 * tl.exp(-0.5 * z * z) / deviation
    return mean + deviation * tl.where(fraction > 0.5, -z, z), density


@triton.jit
def _extremes(keys):
    """Lowest valid key, and the highest plus one, which no key reaches."""
    return tl.min(tl.where(keys == _NONE, _NAN, keys)), tl.max(keys) + 1


@triton.jit
def _inside(pivot, low, high):
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@triton.jit
def _next_pivot(low, high, num_low, num_high, low_value, high_value, target, step):
    """A key inside (low, high) that about target keys reach."""
    part = (num_low - target - 0.5) / (num_low - num_high)
    guess = _order_keys(low_value + part * (high_value - low_value))
    # The mean without overflow. Where guessing does not help, every second step bisects.
    middle = (low & high) + ((low ^ high) >> 1)
    bisects = (step % 6 == 5) | ((step > 12) & (step % 2 == 1))
    return _inside(tl.where(bisects, middle, guess), low, high)


@triton.jit
def _kth_key(keys, num_keys, topk, slack, guess, low, high):
    """Threshold and room: the selection is all keys above and the first room keys equal to it.

    keys [n] int32, of which num_keys > topk are valid, in [low, high). It may also be a threshold
    that topk to topk + slack keys reach; then there is room for all of them.
    """
    num_low, num_high = num_keys, num_keys * 0
    pivot = _inside(_order_keys(guess), low, high)
    step = 0
    while (num_low > topk + slack) & (low + 1 < high):
        num_pivot = tl.sum((keys >= pivot).to(tl.int32))
        if num_pivot >= topk:
            low, num_low = pivot, num_pivot
        else:
            high, num_high = pivot, num_pivot
        pivot = _next_pivot(
            low, high, num_low, num_high, _value_of(low), _value_of(high - 1), topk, step
        )
        step += 1
    return low, tl.where(num_low <= topk + slack, _UNLIMITED, topk - num_high)


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
def _load_scores(row_ptr, offset, end, TILE: tl.constexpr):
    slots = tl.arange(0, TILE)
    return tl.load(row_ptr + offset + slots, mask=slots < end - offset, other=float("-inf"))


@triton.jit
def _reach(scores, bound):
    # Above infinity the bound is NaN, and only NaN reaches it.
    return ((scores >= bound) | (scores != scores)).to(tl.int32)


@triton.jit
def _filter(
    row_ptr, start, end, pivot, candidates_ptr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count the keys that reach the pivot, and store the first CAPACITY positions in order."""
    bound = _value_of(pivot)
    count = 0
    for offset in tl.range(start, end, 2 * TILE):
        columns = offset + tl.arange(0, TILE)
        left = _reach(_load_scores(row_ptr, offset, end, TILE), bound)
        right = _reach(_load_scores(row_ptr, offset + TILE, end, TILE), bound)
        # One prefix sum ranks two tiles.
        packed = left | (right << 16)
        ranks, totals = tl.cumsum(packed, axis=0), tl.sum(packed)
        left_slots = count + (ranks & 0xFFFF) - 1
        right_slots = count + (totals & 0xFFFF) + (ranks >> 16) - 1
        count += (totals & 0xFFFF) + (totals >> 16)
        stored = (left == 1) & (left_slots < CAPACITY)
        tl.store(candidates_ptr + left_slots, columns, mask=stored)
        stored = (right == 1) & (right_slots < CAPACITY)
        tl.store(candidates_ptr + right_slots, columns + TILE, mask=stored)
    # Other threads of this program read the candidates back.
    tl.debug_barrier()
    return count


@triton.jit
def _sample(row_ptr, start, num_keys, topk, SIZE: tl.constexpr, CAPACITY: tl.constexpr):
    """From evenly spaced keys: a key that topk to CAPACITY keys should reach, and the extremes.

    Also the distance between two neighbouring scores there.
    """
    columns = start + tl.arange(0, SIZE) * (num_keys // SIZE)
    keys = _order_keys(tl.load(row_ptr + columns))
    expected = topk.to(tl.float32) * SIZE / num_keys
    middle = (topk + CAPACITY) * (SIZE * 0.5) / num_keys
    rank = tl.minimum(expected + 3.0 * tl.sqrt(expected) + 1.0, middle).to(tl.int32)
    rank = tl.minimum(tl.maximum(rank, 1), SIZE - 1)
    low, high = _extremes(keys)
    size = num_keys * 0 + SIZE
    guess, density = _normal_fit(keys, size, rank)
    pivot, _ = _kth_key(keys, size, rank, rank // 16, guess, low, high)
    return pivot, _value_of(low), _value_of(high - 1), 1.0 / (density * num_keys)


@triton.jit
def _narrow(
    row_ptr, start, end, topk, candidates_ptr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store candidates: their number, a guess of the k-th score, the threshold, and its room.

    A number above CAPACITY means that too many are tied; only then do the last two count.
    """
    num_keys = end - start
    pivot, low_value, high_value, spacing = _sample(
        row_ptr, start, num_keys, topk, CAPACITY // 4, CAPACITY
    )
    low, high = pivot * 0 + _MINUS_INFINITY, pivot * 0 + _NAN + 1
    num_low, num_high = num_keys, num_keys * 0
    pivot = _inside(pivot, low, high)
    target = tl.maximum(topk, (topk + CAPACITY) // 2)
    step = 0
    while (num_low > CAPACITY) & (low + 1 < high):
        count = _filter(row_ptr, start, end, pivot, candidates_ptr, CAPACITY, TILE)
        if count >= topk:
            low, num_low, low_value = pivot, count, _value_of(pivot)
        else:
            high, num_high, high_value = pivot, count, _value_of(pivot)
        pivot = _next_pivot(low, high, num_low, num_high, low_value, high_value, target, step)
        step += 1
    return num_low, low_value + (num_low - topk) * spacing, low, topk - num_high


@triton.jit
def _list_tied_row(
    row_ptr, out_ptr, start, end, threshold, room, TILE: tl.constexpr
):  # fmt: skip
    num_above, num_tied = 0, 0
    for offset in tl.range(start, end, TILE):
        columns = offset + tl.arange(0, TILE)
        valid = columns < end
        scores = tl.load(row_ptr + columns, mask=valid, other=0.0)
        keys = tl.where(valid, _order_keys(scores), _NONE)
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
        num_keys, guess, threshold, room = _narrow(
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
        keys = tl.where(valid, _order_keys(scores), _NONE)
        low, high = _extremes(keys)
        if not is_long:
            guess, _ = _normal_fit(keys, num_keys, topk)
        threshold, room = _kth_key(keys, num_keys, topk, 0, guess, low, high)
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
