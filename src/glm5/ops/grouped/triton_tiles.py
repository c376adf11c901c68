"""Tiles of rows that lie in one group each, found on the device from where the groups end."""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor


class RowTiles(NamedTuple):
    """Runs of at most `block` rows of one group, in the order of the rows.

    ends [n] int32: of the groups; table [num_bound, 4] int32: group, first row, row behind the last
    one, and a number that counts the tiles of the groups that have several, -1 for a group's only
    tile; num_tiles [1] int32: how many there are. The host knows the bounds alone: num_bound tiles,
    num_shared of such groups.
    """

    ends: Tensor
    table: Tensor
    num_tiles: Tensor
    block: int
    num_bound: int
    num_shared: int

    @classmethod
    def of(cls, ends: Tensor, num_rows: int, block: int, *, keep_empty: bool = False) -> Self:
        """ends [n] int32, num_rows = ends[n - 1]; keep_empty: an empty group has an empty tile."""
        n = len(ends)
        num_bound = num_rows // block + n
        table = torch.empty(num_bound, 4, dtype=torch.int32, device=ends.device)
        num_tiles = torch.empty(1, dtype=torch.int32, device=ends.device)
        options: dict[str, Any] = {"BLOCK": block, "GROUPS": triton.next_power_of_2(n)}
        _row_tiles_kernel[(n,)](
            ends, table, num_tiles, n, KEEP_EMPTY=keep_empty, num_warps=2, **options
        )
        return cls(ends, table, num_tiles, block, num_bound, 2 * (num_rows // block))


@triton.jit
def tiles_before(
    ends_ptr, group, BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEEP_EMPTY: tl.constexpr
):
    """First row of the group, and tiles before it: all, and those of groups that have several."""
    groups = tl.arange(0, GROUPS)
    before = groups < group
    end = tl.load(ends_ptr + groups, mask=before, other=0)
    start = tl.load(ends_ptr + groups - 1, mask=before & (groups > 0), other=0)
    tiles = (end - start + BLOCK - 1) // BLOCK
    if KEEP_EMPTY:
        tiles = tl.where(before, tl.maximum(tiles, 1), 0)
    return tl.max(end, 0), tl.sum(tiles, 0), tl.sum(tl.where(tiles > 1, tiles, 0), 0)


@triton.jit(do_not_specialize=["n"])
def _row_tiles_kernel(
    ends_ptr, table_ptr, count_ptr, n,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEEP_EMPTY: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    first, tile, shared = tiles_before(ends_ptr, group, BLOCK, GROUPS, KEEP_EMPTY)
    end = tl.load(ends_ptr + group)
    num_tiles = (end - first + BLOCK - 1) // BLOCK
    if KEEP_EMPTY:
        num_tiles = tl.maximum(num_tiles, 1)
    for i in range(0, num_tiles):
        entry = table_ptr + (tile + i) * 4
        start = first + i * BLOCK
        tl.store(entry, group)
        tl.store(entry + 1, start)
        tl.store(entry + 2, tl.minimum(start + BLOCK, end))
        tl.store(entry + 3, tl.where(num_tiles > 1, shared + i, -1))
    if group == n - 1:
        tl.store(count_ptr, tile + num_tiles)
