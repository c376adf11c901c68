"""Adds up the gradient rows of each key in a fixed order."""

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.sparse_mla.key_lists import KeyLists


@triton.jit
def _add_key_rows_kernel(
    rows,
    entries,
    counts,
    sums,
    num_rows,
    width,
    num_columns,
    NUM_PARTS: tl.constexpr,
    SHUFFLED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    key = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_place = places[None, :] < num_columns
    count = tl.load(counts + key)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for first in range(0, count, BLOCK_N):
        numbers = first + tl.arange(0, BLOCK_N)
        is_entry = numbers < count
        entry = tl.load(entries + key * num_rows + numbers, mask=is_entry, other=0)
        for part in tl.static_range(NUM_PARTS):
            row = (entry // width * NUM_PARTS + part).to(tl.int64) * width + entry % width
            row_places = rows + row[:, None] * num_columns + places[None, :]
            tile = tl.load(row_places, mask=is_entry[:, None] & is_place, other=0.0)
            total += tile.to(tl.float32)
    columns = places
    if SHUFFLED:
        # Undoes the order of hopper_grad_keys.store_grad_keys: bits 4 3 2 1 are columns' 2 1 4 3.
        columns = (places & ~30) | ((places & 24) >> 2) | ((places & 6) << 2)
    target = sums + key * num_columns + columns
    before = tl.load(target, mask=places < num_columns, other=0.0)
    tl.store(target, before + tl.sum(total, 0), mask=places < num_columns)


def add_key_rows(rows: Tensor, lists: KeyLists, sums: Tensor, *, shuffled: bool) -> None:
    """sums[j] += the rows of the entries that chose key j: no atomics, the same bits every time.

    rows [num_rows, num_parts, width, d] any float dtype, of which only those of the lists are read;
    sums [t_k, d] fp32; shuffled says that the columns of rows stand in the order of
    hopper_grad_keys.store_grad_keys.
    """
    _, num_parts, width, d = rows.shape
    num_keys, num_rows = lists.entries.shape
    if num_keys == 0 or num_rows == 0:
        return
    # One line of a bf16 row for one warp: of twelve shapes the fastest on an H200.
    block_d = min(64, max(16, triton.next_power_of_2(d)))
    _add_key_rows_kernel[(num_keys, triton.cdiv(d, block_d))](
        rows,
        lists.entries,
        lists.counts,
        sums,
        num_rows,
        width,
        d,
        NUM_PARTS=num_parts,
        SHUFFLED=shuffled,
        BLOCK_N=16,
        BLOCK_D=block_d,
        num_warps=1,
    )
