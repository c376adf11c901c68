"""Narrow a long score row to candidates that contain its best keys, reading it once as a rule.

The k-th score of a sample, lowered by a margin, leaves between topk and CAPACITY candidates. Where
it does not, the search narrows on: the row is read again, with the bracket that the counts give.
"""

import triton
import triton.language as tl

from glm5.ops.indexer.triton_search import (
    MINUS_INFINITY,
    NAN,
    extremes,
    inside,
    kth_key,
    next_pivot,
    normal_fit,
    order_keys,
    value_of,
)


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
    bound = value_of(pivot)
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
    keys = order_keys(tl.load(row_ptr + columns))
    expected = topk.to(tl.float32) * SIZE / num_keys
    middle = (topk + CAPACITY) * (SIZE * 0.5) / num_keys
    rank = tl.minimum(expected + 3.0 * tl.sqrt(expected) + 1.0, middle).to(tl.int32)
    rank = tl.minimum(tl.maximum(rank, 1), SIZE - 1)
    low, high = extremes(keys)
    size = num_keys * 0 + SIZE
    guess, density = normal_fit(keys, size, rank)
    pivot, _ = kth_key(keys, size, rank, rank // 16, guess, low, high)
    return pivot, value_of(low), value_of(high - 1), 1.0 / (density * num_keys)


@triton.jit
def narrow(
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
    low, high = pivot * 0 + MINUS_INFINITY, pivot * 0 + NAN + 1
    num_low, num_high = num_keys, num_keys * 0
    pivot = inside(pivot, low, high)
    target = tl.maximum(topk, (topk + CAPACITY) // 2)
    step = 0
    while (num_low > CAPACITY) & (low + 1 < high):
        count = _filter(row_ptr, start, end, pivot, candidates_ptr, CAPACITY, TILE)
        if count >= topk:
            low, num_low, low_value = pivot, count, value_of(pivot)
        else:
            high, num_high, high_value = pivot, count, value_of(pivot)
        pivot = next_pivot(low, high, num_low, num_high, low_value, high_value, target, step)
        # Too many candidates are most often ties with the pivot itself: then this ends the search.
        pivot = tl.where((step == 0) & (count >= topk), low + 1, pivot)
        step += 1
    return num_low, low_value + (num_low - topk) * spacing, low, topk - num_high
