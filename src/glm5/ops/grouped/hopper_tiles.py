"""What the products on Hopper share: the order of tiles, rings of barriers, and how a tile ends."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glm5.ops.grouped.triton_factors import Factors

# A tile of the result, and what one step of the depth takes of 2-byte operands.
ROWS, COLUMNS, DEPTH = 128, 256, 64
# Measured on an H200: 4, 8 and 16 differ by 2 %, and 8 is at most 2 % behind the best everywhere.
TOGETHER = 8
MOST_PAIRS = 2
# The same where a warpgroup prepares the weights: more rows for each of them.
SCALED_ROWS, SCALED_COLUMNS, SCALED_TOGETHER = 256, 128, 4


@gluon.jit
def place(
    tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER: gl.constexpr, COLUMNS: gl.constexpr
):
    """Tile of rows, its group, first row, row behind the last one, and first column, of a tile."""
    per_block = TOGETHER * num_column_tiles
    first = tile // per_block * TOGETHER
    height = gl.minimum(num_row_tiles - first, TOGETHER)
    within = tile % per_block
    row_tile = first + within % height
    entry = table_ptr + row_tile * 4
    column = within // height * COLUMNS
    return row_tile, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), column


@gluon.jit
def num_tail_steps(
    column, part_columns, PARTS: gl.constexpr, FORWARD: gl.constexpr, RANK_STEPS: gl.constexpr
):
    """Steps that the pairs add: those of the column's pair, or of all pairs."""
    if FORWARD:
        steps = 0
        for p in gl.static_range(len(PARTS)):
            steps = gl.where(column // part_columns == PARTS[p], RANK_STEPS, steps)
        return steps
    else:
        return len(PARTS) * RANK_STEPS


@gluon.jit
def has_tail(column, part_columns, PART: gl.constexpr, FORWARD: gl.constexpr):
    """Whether the pair of a part adds to this column."""
    mine = not FORWARD
    if FORWARD:
        mine = column // part_columns == PART
    return mine


@gluon.jit
def ring(num: gl.constexpr, count: gl.constexpr):
    """Barriers of a ring of buffers, each of which waits for `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def scale_tables(num: gl.constexpr):
    """Shared memory for scales that tiles meet along the depth."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.float32, [num, 128], layout)


@gluon.jit
def fill_scale_table(table, first_ptr, stride, count):
    """At most 128 scales: read from global memory each step, a step would wait for them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    block = gl.arange(0, 128, layout=layout)
    scales = gl.load(first_ptr + block * stride, mask=block < count, other=0.0)
    gl.thread_barrier()
    table.store(scales)
    gl.thread_barrier()


@gluon.jit
def scale_of(table, block, layout: gl.constexpr):
    """That of a block of the depth, as a tensor of one element."""
    return table._reinterpret(gl.float32, [128, 1], table.layout).index(block % 128).load(layout)


@gluon.jit
def store_piece(piece, staging, out_desc, out_ptr, row, last, column, out_columns):
    """64 rows of 64 or 128 columns, through shared memory; rows from `last` on are another
    group's."""
    tma.store_wait(0)
    gl.thread_barrier()
    staging.store(piece.to(out_desc.dtype))
    if row + 64 <= last:
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [row, column], staging)
    else:
        gl.thread_barrier()
        _store_rows(out_ptr, staging, row, last, column, out_columns)


@gluon.jit
def _store_rows(out_ptr, staging, row, last, column, out_columns):
    """The rows before `last`, as the last tile of a group has."""
    width: gl.constexpr = staging.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    gl.store(
        out_ptr + rows.to(gl.int64)[:, None] * out_columns + columns[None, :],
        staging.load(layout), mask=(rows < last)[:, None] & (columns < out_columns)[None, :],
    )  # fmt: skip


@cache
def shared_layout(num_dims: int, bits: int = 16, swizzle: int = 128) -> gl.NVMMASharedLayout:
    """Of a tile that TMA loads and wgmma reads."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=num_dims)


def descriptor(x: Tensor, shape: list[int], swizzle: int = 128) -> TensorDescriptor:
    """Of tiles of `shape` of a contiguous tensor."""
    layout = shared_layout(len(shape), 8 * x.element_size(), swizzle)
    return TensorDescriptor.from_tensor(x, shape, layout)


def aligned(b: Tensor) -> Tensor:
    """Factors whose rows TMA can find: of whole 16 bytes."""
    missing = -b.shape[2] % 8
    return torch.nn.functional.pad(b, (0, missing)) if missing else b


def pair_arguments(
    x: Tensor, low: Tensor | None, factors: Factors | None, *, rows: int, factor: list[int],
    forward: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the kernels take of the pairs; rows of a tile; factor: columns and ranks of a tile."""
    if low is None or factors is None:
        stand_in = descriptor(x, [rows, 2 * DEPTH // x.element_size()])
        return {
            "low_desc": stand_in, "factor_0": stand_in, "factor_1": stand_in,
            "group_stride_0": 0, "group_stride_1": 0, "PARTS": (), "RANK": 16, "RANK_STEPS": 1,
        }  # fmt: skip
    padded = [aligned(y) for y in factors.tensors] if forward else factors.tensors
    box = [1, *factor] if forward else [1, *reversed(factor)]
    # A kernel takes two descriptors of factors; one pair's is given twice.
    first, second = ([descriptor(y, box) for y in padded] * 2)[:2]
    strides = [int(len(y) > 1) for y in factors.tensors] * 2
    return {
        "low_desc": descriptor(low, [rows, DEPTH]), "factor_0": first, "factor_1": second,
        "group_stride_0": strides[0], "group_stride_1": strides[1], "PARTS": factors.parts,
        "RANK": factors.padded_rank, "RANK_STEPS": triton.cdiv(factors.padded_rank, DEPTH),
    }  # fmt: skip
