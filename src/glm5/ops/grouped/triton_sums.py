"""Products summed over the rows of each group: the gradients of factors and weights.

The rows of a group are cut into chunks. A group of one chunk is written by the program that sums
it; the sums of several chunks are kept in fp32 and added up in order, so that the bits are the
same every time and a group with most of the rows is as fast as many small ones.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.grouped.triton_factors import is_interpreted, padded_size
from glm5.ops.grouped.triton_tiles import RowTiles, tiles_before


class SumTiles(NamedTuple):
    """Columns of both sides of one program, rows of one step, and the compiler's options."""

    left: int
    right: int
    rows: int
    num_warps: int
    num_stages: int


@triton.jit
def _row_sums_kernel(
    left_ptr, right_ptr, out_ptr, partial_ptr, table_ptr, count_ptr,
    num_left, num_right, left_stride, right_stride, out_group, out_left, out_right,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if tile < tl.load(count_ptr):
        group = tl.load(table_ptr + tile * 4)
        first = tl.load(table_ptr + tile * 4 + 1)
        last = tl.load(table_ptr + tile * 4 + 2)
        slot = tl.load(table_ptr + tile * 4 + 3)
        lefts = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
        rights = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        is_left, is_right = lefts < num_left, rights < num_right
        acc = tl.zeros([BLOCK_L, BLOCK_R], tl.float32)
        for start in tl.range(first, last, BLOCK_T):
            rows = start + tl.arange(0, BLOCK_T)
            is_row = rows[:, None] < last
            left = tl.load(
                left_ptr + rows.to(tl.int64)[:, None] * left_stride + lefts[None, :],
                mask=is_row & is_left[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                right_ptr + rows.to(tl.int64)[:, None] * right_stride + rights[None, :],
                mask=is_row & is_right[None, :], other=0.0,
            )  # fmt: skip
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            acc = tl.dot(left.T, right, acc, input_precision="ieee")
        mask = is_left[:, None] & is_right[None, :]
        if slot < 0:
            out = out_ptr + group.to(tl.int64) * out_group
            tl.store(
                out + lefts.to(tl.int64)[:, None] * out_left + rights[None, :] * out_right,
                acc.to(out_ptr.dtype.element_ty), mask=mask,
            )  # fmt: skip
        else:
            partial = partial_ptr + slot.to(tl.int64) * num_left * num_right
            offsets = lefts.to(tl.int64)[:, None] * num_right + rights[None, :]
            tl.store(partial + offsets, acc, mask=mask)


@triton.jit(do_not_specialize=["n"])
def _add_chunks_kernel(
    out_ptr, partial_ptr, ends_ptr, n, num_left, num_right, out_group, out_left, out_right,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    first, _, slot = tiles_before(ends_ptr, group, n, CHUNK, GROUPS)
    num_chunks = (tl.load(ends_ptr + group) - first + CHUNK - 1) // CHUNK
    if num_chunks != 1:
        lefts = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
        rights = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (lefts < num_left)[:, None] & (rights < num_right)[None, :]
        offsets = lefts.to(tl.int64)[:, None] * num_right + rights[None, :]
        total = tl.zeros([BLOCK_L, BLOCK_R], tl.float32)
        for i in range(0, num_chunks):
            partial = partial_ptr + (slot + i).to(tl.int64) * num_left * num_right
            total += tl.load(partial + offsets, mask=mask, other=0.0)
        out = out_ptr + group.to(tl.int64) * out_group
        tl.store(
            out + lefts.to(tl.int64)[:, None] * out_left + rights[None, :] * out_right,
            total.to(out_ptr.dtype.element_ty), mask=mask,
        )  # fmt: skip


def row_sums(left: Tensor, right: Tensor, ends: Tensor, out: Tensor, tiles: RowTiles) -> None:
    """out_g = left_g^T right_g, summed in fp32 over the rows of each group; zeros without rows.

    left [t, l], right [t, r] with unit stride in their columns -> out [n, l, r], any strides;
    tiles: chunks of the rows of `ends`.
    """
    n, num_left, num_right = out.shape
    if out.numel() == 0:
        return
    partial = left.new_empty(max(1, tiles.num_shared), num_left, num_right, dtype=torch.float32)
    block = sum_tiles(left, num_right)
    columns = triton.cdiv(num_left, block.left), triton.cdiv(num_right, block.right)
    if tiles.num_bound:
        _row_sums_kernel[(columns[0], tiles.num_bound, columns[1])](
            left, right, out, partial, tiles.table, tiles.num_tiles,
            num_left, num_right, left.stride(0), right.stride(0), *out.stride(),
            BLOCK_L=block.left, BLOCK_R=block.right, BLOCK_T=block.rows,
            UPCAST=is_interpreted(left), num_warps=block.num_warps, num_stages=block.num_stages,
        )  # fmt: skip
    options: dict[str, Any] = {"CHUNK": tiles.block, "GROUPS": triton.next_power_of_2(n)}
    _add_chunks_kernel[(columns[0], n, columns[1])](
        out, partial, ends, n, num_left, num_right, *out.stride(),
        BLOCK_L=block.left, BLOCK_R=block.right, num_warps=block.num_warps, **options,
    )  # fmt: skip


def sum_chunk(num_right: int) -> int:
    """Rows of a chunk; a weight's gradient keeps no chunks' sums unless a group is huge."""
    return 2048 if num_right <= 256 else 2**20


def sum_tiles(left: Tensor, num_right: int) -> SumTiles:
    """Tile sizes."""
    right = padded_size(num_right)
    if left.element_size() != 2:
        return SumTiles(32, min(32, right), 32, 4, 2)
    if right > 128:
        return SumTiles(128, 128, 64, 8, 3)
    return SumTiles(128, right, 64, 4, 4)
