"""The product of each group's rows with its weight, and the pairs' part in the same accumulator.

Programs stay for many tiles. A tile's last product has the padded rank as its depth: the low-rank
side times the outer factor, so that the pairs cost no pass of their own over the output.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glm5.ops.block_scaled import BlockScaled
from glm5.ops.block_scaled.quantise import quantise_rows
from glm5.ops.grouped.triton_factors import (
    Factors,
    is_interpreted,
    pair_factor,
    pair_of_part,
    slot_rows,
)
from glm5.ops.grouped.triton_tiles import RowTiles

# Ranks of one step of the tail.
TAIL_STEP = 32


class MatmulTiles(NamedTuple):
    """A program's output tile, its step along the depth, tiles of rows that go together for the
    sake of L2, and the compiler's options."""

    rows: int
    columns: int
    depth: int
    together: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@triton.jit
def _tail(
    low_ptr, factors, ranks, group_strides, group, rows, last, columns, column_end, pair, step,
    num_slots, part_columns, in_features,
    RANK: tl.constexpr, FORWARD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One step of the tail: low [BLOCK_M, STEP] and the outer factor [STEP, BLOCK_N]."""
    steps = step + tl.arange(0, STEP)
    is_column = columns < column_end
    if FORWARD:
        factor_ptr, rank = pair_factor(factors, ranks, group_strides, group, pair)
        in_part = columns % part_columns
        factor = tl.load(
            factor_ptr + in_part[:, None] * rank + steps[None, :],
            mask=is_column[:, None] & (steps < rank)[None, :], other=0.0,
        ).T  # fmt: skip
        slots, is_slot = tl.maximum(pair, 0) * RANK + steps, steps < rank
    else:
        factor_rows, is_slot = slot_rows(
            factors, ranks, group_strides, group, steps, in_features, RANK
        )
        factor = tl.load(
            factor_rows[:, None] + columns[None, :],
            mask=is_slot[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        slots = steps
    low = tl.load(
        low_ptr + rows.to(tl.int64)[:, None] * num_slots + slots[None, :],
        mask=(rows < last)[:, None] & is_slot[None, :], other=0.0,
    )  # fmt: skip
    return low, factor


@triton.jit
def _tile_of(tile, num_row_tiles, num_column_tiles, TOGETHER: tl.constexpr):
    """Row and column tile of a number: columns of TOGETHER row tiles, one after the other."""
    per_block = TOGETHER * num_column_tiles
    first = tile // per_block * TOGETHER
    height = tl.minimum(num_row_tiles - first, TOGETHER)
    within = tile % per_block
    return first + within % height, within // height


@triton.jit
def _weight_scales(
    scales_ptr, columns, ks, mask, grid_columns,
    FORWARD: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scale of each element of a weight's tile [depth, columns]."""
    if FORWARD:
        places = (columns // SCALE_ROWS * grid_columns)[None, :] + (ks // SCALE_COLUMNS)[:, None]
    else:
        places = (ks // SCALE_ROWS * grid_columns)[:, None] + (columns // SCALE_COLUMNS)[None, :]
    return tl.load(scales_ptr + places, mask=mask, other=0.0)


@triton.jit
def _grouped_matmul_kernel(
    x, weight, out_ptr, low_ptr, table_ptr, count_ptr,
    w_scales_ptr, x_scales_ptr, grid_rows, grid_columns, x_pieces,
    factors, ranks, group_strides, parts,
    num_slots, depth, out_columns, part_columns, in_features,
    RANK: tl.constexpr, FORWARD: tl.constexpr, HAS_BASE: tl.constexpr, HAS_PAIRS: tl.constexpr,
    TAIL: tl.constexpr, TAIL_STEP: tl.constexpr, USE_TMA: tl.constexpr,
    IS_SCALED: tl.constexpr, IS_QUANTISED: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    num_row_tiles = tl.load(count_ptr)
    tiles_per_part = tl.cdiv(part_columns, BLOCK_N)
    num_column_tiles = tiles_per_part * (out_columns // part_columns)
    num_tiles = num_row_tiles * num_column_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row_tile, column_tile = _tile_of(tile, num_row_tiles, num_column_tiles, TOGETHER)
        group = tl.load(table_ptr + row_tile * 4)
        first = tl.load(table_ptr + row_tile * 4 + 1)
        last = tl.load(table_ptr + row_tile * 4 + 2)
        part = column_tile // tiles_per_part
        column = part * part_columns + column_tile % tiles_per_part * BLOCK_N
        column_end = (part + 1) * part_columns
        rows, columns = first + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        pair = 0
        if HAS_PAIRS:
            if FORWARD:
                pair = pair_of_part(part, parts)
            # Loaded before the main loop, so that nobody waits for it behind the loop.
            low, factor = _tail(
                low_ptr, factors, ranks, group_strides, group, rows, last, columns, column_end,
                pair, 0, num_slots, part_columns, in_features, RANK, FORWARD, TAIL_STEP,
            )  # fmt: skip
        if HAS_BASE:
            if USE_TMA:
                for k in tl.range(0, depth, BLOCK_K):
                    x_tile = x.load([first, k])
                    if FORWARD:
                        w_tile = weight.load([group * out_columns + column, k]).T
                    else:
                        w_tile = weight.load([group * depth + k, column])
                    if UPCAST:
                        x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
                    acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
            else:
                in_k = tl.arange(0, BLOCK_K)
                x_rows = x + rows.to(tl.int64)[:, None] * depth
                w_group = weight + group.to(tl.int64) * out_columns * depth
                for k in tl.range(0, depth, BLOCK_K):
                    ks = k + in_k
                    x_tile = tl.load(
                        x_rows + ks[None, :],
                        mask=(rows < last)[:, None] & (ks < depth)[None, :], other=0.0,
                    )  # fmt: skip
                    mask = (ks < depth)[:, None] & (columns < column_end)[None, :]
                    if FORWARD:
                        w_ptrs = w_group + columns[None, :] * depth + ks[:, None]
                    else:
                        w_ptrs = w_group + ks[:, None] * out_columns + columns[None, :]
                    w_tile = tl.load(w_ptrs, mask=mask, other=0.0)
                    if IS_SCALED:
                        w_tile = w_tile.to(tl.float32) * _weight_scales(
                            w_scales_ptr + group.to(tl.int64) * grid_rows * grid_columns,
                            columns, ks, mask, grid_columns, FORWARD, SCALE_ROWS, SCALE_COLUMNS,
                        )  # fmt: skip
                        if IS_QUANTISED:
                            piece = ks // (SCALE_COLUMNS if FORWARD else SCALE_ROWS)
                            x_scales = tl.load(
                                x_scales_ptr + rows.to(tl.int64)[:, None] * x_pieces
                                + piece[None, :],
                                mask=(rows < last)[:, None] & (ks < depth)[None, :], other=0.0,
                            )  # fmt: skip
                            x_tile = x_tile.to(tl.float32) * x_scales
                        else:
                            w_tile = w_tile.to(x_tile.dtype)
                    if UPCAST:
                        x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
                    acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if HAS_PAIRS:
            if UPCAST:
                low, factor = low.to(tl.float32), factor.to(tl.float32)
            acc = tl.dot(low, factor, acc, input_precision="ieee")
            for step in tl.static_range(TAIL_STEP, TAIL, TAIL_STEP):
                low, factor = _tail(
                    low_ptr, factors, ranks, group_strides, group, rows, last, columns, column_end,
                    pair, step, num_slots, part_columns, in_features, RANK, FORWARD, TAIL_STEP,
                )  # fmt: skip
                if UPCAST:
                    low, factor = low.to(tl.float32), factor.to(tl.float32)
                acc = tl.dot(low, factor, acc, input_precision="ieee")
        result = acc.to(out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * out_columns + columns[None, :],
            result, mask=(rows < last)[:, None] & (columns < column_end)[None, :],
        )  # fmt: skip


def grouped_matmul(
    x: Tensor, weight: Tensor | BlockScaled | None, tiles: RowTiles, low: Tensor | None,
    factors: Factors | None, shape: tuple[int, int], *, forward: bool, num_parts: int,
    block: MatmulTiles, fp8_compute: bool = False,
) -> Tensor:  # fmt: skip
    """Forward: x W_g^T + low b_g^T; else x W_g + low a_g, for the rows of each group.

    x [t, in or out], low [t, slots] contiguous, weight [n, out, in] contiguous, or None for the
    pairs' part alone; factors: b forward, a else; shape: that of the result; num_parts: equal
    parts of the result's columns, forward -> [t, out or in] in the dtype of x. With `fp8_compute`
    the rows of x are quantised first; the products of what they and a block-scaled weight stand for
    are those of fp32.
    """
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    depth = x.shape[1]
    use_tma = isinstance(weight, Tensor) and _takes_tma(x, weight, depth, block)
    given, scale_arguments = _operands(x, weight, forward=forward, fp8_compute=fp8_compute)
    if use_tma:
        w_block = [block.columns, block.depth] if forward else [block.depth, block.columns]
        given = [
            TensorDescriptor.from_tensor(x, [block.rows, block.depth]),
            TensorDescriptor.from_tensor(given[1].view(-1, given[1].shape[2]), w_block),
        ]
    has_pairs = factors is not None and bool(factors.tensors)
    if factors is None or not has_pairs:
        pair_arguments: dict[str, Any] = _no_pairs(x)
    else:
        pair_arguments = factors.kernel_arguments()
    tail = tail_depth(factors, forward=forward)
    num_programs = block.programs_per_sm * _num_processors(x)
    part_columns = shape[1] // num_parts
    bound = tiles.num_bound * num_parts * triton.cdiv(part_columns, block.columns)
    _grouped_matmul_kernel[(min(num_programs, bound),)](
        *given, out, x if low is None else low, tiles.table, tiles.num_tiles, **scale_arguments,
        num_slots=0 if low is None else low.shape[1], depth=depth, out_columns=shape[1],
        part_columns=part_columns, in_features=shape[1], **pair_arguments,
        FORWARD=forward, HAS_BASE=weight is not None, HAS_PAIRS=has_pairs,
        TAIL=tail, TAIL_STEP=min(tail, TAIL_STEP), USE_TMA=use_tma, **block_options(x, block),
    )  # fmt: skip
    return out


def _operands(
    x: Tensor, weight: Tensor | BlockScaled | None, *, forward: bool, fp8_compute: bool
) -> tuple[list[Any], dict[str, Any]]:
    """What the kernel multiplies, and its arguments about scales."""
    scales: dict[str, Any] = {
        "w_scales_ptr": x, "x_scales_ptr": x, "grid_rows": 0, "grid_columns": 0, "x_pieces": 0,
        "IS_SCALED": False, "IS_QUANTISED": False, "SCALE_ROWS": 1, "SCALE_COLUMNS": 1,
    }  # fmt: skip
    if not isinstance(weight, BlockScaled):
        return [x, x if weight is None else weight], scales
    scales |= {
        "w_scales_ptr": weight.scales, "grid_rows": weight.scales.shape[1],
        "grid_columns": weight.scales.shape[2], "IS_SCALED": True,
        "SCALE_ROWS": weight.block[0], "SCALE_COLUMNS": weight.block[1],
    }  # fmt: skip
    if not fp8_compute:
        return [x, weight.values], scales
    values, row_scales = quantise_rows(x, weight.block[1 if forward else 0])
    scales |= {
        "x_scales_ptr": row_scales, "x_pieces": row_scales.shape[1], "IS_QUANTISED": True
    }  # fmt: skip
    return [values, weight.values], scales


def block_options(x: Tensor, block: MatmulTiles) -> dict[str, Any]:
    """What a kernel takes of its tiles."""
    return {
        "BLOCK_M": block.rows,
        "BLOCK_N": block.columns,
        "BLOCK_K": block.depth,
        "TOGETHER": block.together,
        "UPCAST": is_interpreted(x),
        "num_warps": block.num_warps,
        "num_stages": block.num_stages,
    }


def tail_depth(factors: Factors | None, *, forward: bool) -> int:
    """Depth of a tile's last product: one pair's padded rank, or that of all of them."""
    if factors is None or not factors.tensors:
        return 16
    together = 1 if forward else triton.next_power_of_2(len(factors.tensors))
    return factors.padded_rank * together


def choose_tiles(
    x: Tensor, rows: int, columns: int, tail: int, *, is_scaled: bool = False
) -> MatmulTiles:
    """Tiles of so many rows, or of 64, by the dtype, the narrowest part, the tail and the GPU;
    small ones where weights have scales: their tiles are made in registers.

    Tiles of 128 rows with a tail of several steps were wrong on an H200 with Triton 3.6.
    The widest one was the fastest of six on an H200; GPUs with less memory in a multiprocessor
    take one that fits there, which was not measured.
    """
    if x.element_size() != 2:
        return MatmulTiles(rows, 64, 32, 8, 4, 2, 4)
    if is_scaled:
        return MatmulTiles(64, 64, 32, 8, 4, 2, 4)
    is_large = _has_hopper_memory(x)
    if rows == 128 and columns >= 256 and tail <= TAIL_STEP and is_large:
        return MatmulTiles(rows, 256, 64, 8, 8, 4, 1)
    return MatmulTiles(64, 128 if columns > 64 else 64, 64, 8, 4, 4 if is_large else 2, 2)


def _has_hopper_memory(x: Tensor) -> bool:
    """Whether a multiprocessor has 228 KiB of shared memory."""
    if not x.is_cuda:
        return True
    properties = torch.cuda.get_device_properties(x.device)
    return properties.shared_memory_per_multiprocessor >= 228 * 1024


def _no_pairs(x: Tensor) -> dict[str, Any]:
    """Arguments that the kernel does not read."""
    return {"factors": (x,), "ranks": (0,), "group_strides": (0,), "parts": (0,), "RANK": 16}


def _takes_tma(x: Tensor, weight: Tensor, depth: int, block: MatmulTiles) -> bool:
    """Whether rows begin at 16 bytes, and no step of the depth reaches into the next weight."""
    tensors = (x, weight)
    aligned = all(y.data_ptr() % 16 == 0 for y in tensors)
    whole_rows = all(y.shape[-1] * y.element_size() % 16 == 0 for y in tensors)
    return aligned and whole_rows and x.element_size() == 2 and depth % block.depth == 0


def _num_processors(x: Tensor) -> int:
    """Of the GPU; few for the interpreter, so that programs stay for several tiles."""
    if is_interpreted(x):
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count
