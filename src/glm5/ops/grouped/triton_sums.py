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

from glm5.ops.grouped.triton_factors import (
    Factors,
    is_interpreted,
    padded_size,
    pair_factor,
    part_of_pair,
    slot_rows,
)
from glm5.ops.grouped.triton_tiles import RowTiles, tiles_before

# Rows of a chunk of factors' gradients. Smaller ones write more sums than they read rows.
FACTOR_CHUNK = 2048


class SumTiles(NamedTuple):
    """Columns of both sides of one program, rows of one step, and the compiler's options."""

    left: int
    right: int
    rows: int
    num_warps: int
    num_stages: int


@triton.jit
def _sums_of(
    outs, ranks, group_strides, group, lefts, block, num_left,
    RANK: tl.constexpr, IS_A: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Columns of the right side, which of them exist, and where the sums of lefts with them go."""
    if IS_A:
        columns = block * BLOCK_R + tl.arange(0, BLOCK_R)
        rows, valid = slot_rows(outs, ranks, group_strides, group, columns, num_left, RANK)
        places = rows[None, :] + lefts[:, None]
    else:
        per_pair: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
        in_rank = block % per_pair * BLOCK_R + tl.arange(0, BLOCK_R)
        out, rank = pair_factor(outs, ranks, group_strides, group, block // per_pair)
        columns, valid = block // per_pair * RANK + in_rank, in_rank < rank
        places = out + lefts.to(tl.int64)[:, None] * rank + in_rank[None, :]
    return columns, valid, places


@triton.jit
def _row_sums_kernel(
    left_ptr, right_ptr, partial_ptr, table_ptr, count_ptr,
    factors, ranks, group_strides, parts, num_left, left_stride, right_stride,
    RANK: tl.constexpr, IS_A: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if tile < tl.load(count_ptr):
        group = tl.load(table_ptr + tile * 4)
        first = tl.load(table_ptr + tile * 4 + 1)
        last = tl.load(table_ptr + tile * 4 + 2)
        slot = tl.load(table_ptr + tile * 4 + 3)
        block = tl.program_id(2)
        lefts = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
        is_left = lefts < num_left
        columns, is_right, places = _sums_of(
            factors, ranks, group_strides, group, lefts, block, num_left, RANK, IS_A, BLOCK_R
        )
        if not IS_A:
            per_pair: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
            left_ptr += part_of_pair(block // per_pair, parts) * num_left
        acc = tl.zeros([BLOCK_L, BLOCK_R], tl.float32)
        for start in tl.range(first, last, BLOCK_T):
            rows = start + tl.arange(0, BLOCK_T)
            is_row = rows[:, None] < last
            left = tl.load(
                left_ptr + rows.to(tl.int64)[:, None] * left_stride + lefts[None, :],
                mask=is_row & is_left[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                right_ptr + rows.to(tl.int64)[:, None] * right_stride + columns[None, :],
                mask=is_row & is_right[None, :], other=0.0,
            )  # fmt: skip
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            acc = tl.dot(left.T, right, acc, input_precision="ieee")
        if slot < 0:
            mask = is_left[:, None] & is_right[None, :]
            tl.store(places, acc.to(factors[0].dtype.element_ty), mask=mask)
        else:
            width = tl.num_programs(2) * BLOCK_R
            partial = partial_ptr + slot.to(tl.int64) * num_left * width
            kept = lefts.to(tl.int64)[:, None] * width + tl.arange(0, BLOCK_R)[None, :]
            tl.store(partial + kept + block * BLOCK_R, acc, mask=is_left[:, None])


@triton.jit
def _add_chunks_kernel(
    partial_ptr, ends_ptr, factors, ranks, group_strides, num_left,
    RANK: tl.constexpr, IS_A: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group, block = tl.program_id(1), tl.program_id(2)
    first, _before, slot = tiles_before(ends_ptr, group, CHUNK, GROUPS, True)
    num_chunks = (tl.load(ends_ptr + group) - first + CHUNK - 1) // CHUNK
    if num_chunks > 1:
        lefts = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
        is_left = lefts < num_left
        _columns, is_right, places = _sums_of(
            factors, ranks, group_strides, group, lefts, block, num_left, RANK, IS_A, BLOCK_R
        )
        width = tl.num_programs(2) * BLOCK_R
        kept = lefts.to(tl.int64)[:, None] * width + tl.arange(0, BLOCK_R)[None, :]
        kept += block * BLOCK_R
        total = tl.zeros([BLOCK_L, BLOCK_R], tl.float32)
        for i in range(0, num_chunks):
            partial = partial_ptr + (slot + i).to(tl.int64) * num_left * width
            total += tl.load(partial + kept, mask=is_left[:, None], other=0.0)
        mask = is_left[:, None] & is_right[None, :]
        tl.store(places, total.to(factors[0].dtype.element_ty), mask=mask)


def row_sums(left: Tensor, right: Tensor, outs: Factors, chunks: RowTiles, *, is_a: bool) -> None:
    """Fill outs with left_g^T right_g, summed in fp32 over the rows of each group; zeros without.

    Gradients of a: left [t, in], right [t, slots], outs [n, rank, in]. Those of b: left [t, out],
    of which each pair sees its part, right [t, slots], outs [n, rows of a part, rank]. left and
    right contiguous; chunks: of the rows of the outs' groups, empty groups kept.
    """
    arguments = outs.kernel_arguments()
    parts = arguments.pop("parts")
    num_left = outs.tensors[0].shape[2 if is_a else 1]
    block = sum_tiles(left, outs, is_a=is_a)
    if is_a:
        num_blocks = triton.cdiv(outs.num_slots, block.right)
    else:
        num_blocks = len(outs.tensors) * triton.cdiv(outs.padded_rank, block.right)
    partial = left.new_empty(
        chunks.num_shared, num_left, num_blocks * block.right, dtype=torch.float32
    )
    num_columns = triton.cdiv(num_left, block.left)
    arguments |= {"IS_A": is_a, "BLOCK_L": block.left, "BLOCK_R": block.right}
    _row_sums_kernel[(num_columns, chunks.num_bound, num_blocks)](
        left, right, partial, chunks.table, chunks.num_tiles,
        parts=parts, num_left=num_left, left_stride=left.shape[1], right_stride=right.shape[1],
        BLOCK_T=block.rows, UPCAST=is_interpreted(left),
        num_warps=block.num_warps, num_stages=block.num_stages, **arguments,
    )  # fmt: skip
    if chunks.num_shared:
        n = len(chunks.ends)
        options: dict[str, Any] = {"CHUNK": chunks.block, "GROUPS": triton.next_power_of_2(n)}
        _add_chunks_kernel[(num_columns, n, num_blocks)](
            partial, chunks.ends, num_left=num_left, num_warps=block.num_warps,
            **arguments, **options,
        )  # fmt: skip


def sum_tiles(left: Tensor, outs: Factors, *, is_a: bool) -> SumTiles:
    """Tile sizes; one pass over the left side serves as many slots as fit into a tile."""
    right = padded_size(outs.num_slots if is_a else outs.padded_rank)
    if left.element_size() != 2:
        return SumTiles(32, min(32, right), 32, 4, 2)
    return SumTiles(128, min(128, right), 64, 8 if right > 128 else 4, 3)
