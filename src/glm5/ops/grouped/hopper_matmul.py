"""The grouped product on Hopper: wgmma on tiles that arrive by TMA, in programs that stay.

One warp loads; two warpgroups share each tile of the weight, with 64 rows of their own. The pairs
are one more step of the depth: the low-rank side against the outer factor, of which TMA makes
zeros where a rank has fewer than 64 columns.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_tiles import RowTiles

ROWS, COLUMNS, DEPTH = 128, 256, 64
# Measured on an H200: 4, 8 and 16 differ by 2 %, and 8 is at most 2 % behind the best everywhere.
_TOGETHER = 8
_STAGES = 4
_MOST_PAIRS = 2


@gluon.jit
def _place(tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER: gl.constexpr):
    """Group, first row, row behind the last one, and first column of a tile's number."""
    per_block = TOGETHER * num_column_tiles
    first = tile // per_block * TOGETHER
    height = gl.minimum(num_row_tiles - first, TOGETHER)
    within = tile % per_block
    entry = table_ptr + (first + within % height) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), within // height * 256


@gluon.jit
def _num_tail_steps(
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
def _load_tiles(
    x_desc, w_desc, low_desc, factor_descs, smem, bars, table_ptr, sizes,
    group_strides, PARTS: gl.constexpr, RANK: gl.constexpr, RANK_STEPS: gl.constexpr,
    FORWARD: gl.constexpr, TOGETHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer: every step of every tile through a ring of stages."""
    num_row_tiles, num_column_tiles, depth, out_columns, part_columns = sizes
    x_smem, w_smem = smem[0], smem[1]
    full, empty = bars
    done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, first, _last, column = _place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER
        )
        for k in range(0, depth, 64):
            stage = done % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [first, k], bar, x_smem.index(stage))
            place = [group * out_columns + column, k] if FORWARD else [group * depth + k, column]
            tma.async_copy_global_to_shared(w_desc, place, bar, w_smem.index(stage))
            done += 1
        for p in gl.static_range(len(PARTS)):
            mine = not FORWARD
            if FORWARD:
                mine = column // part_columns == PARTS[p]
            if mine:
                for step in gl.static_range(RANK_STEPS):
                    stage = done % STAGES
                    bar = full.index(stage)
                    mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
                    mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        low_desc, [first, p * RANK + step * 64], bar, x_smem.index(stage)
                    )
                    in_part = column - PARTS[p] * part_columns if FORWARD else step * 64
                    inner = step * 64 if FORWARD else column
                    tma.async_copy_global_to_shared(
                        factor_descs[p], [group * group_strides[p], in_part, inner], bar,
                        w_smem.index(stage)._reinterpret(
                            w_desc.dtype, factor_descs[p].block_type.shape, factor_descs[p].layout
                        ),
                    )  # fmt: skip
                    done += 1


@gluon.jit
def _multiply(
    which, out_desc, out_ptr, smem, bars, table_ptr, sizes,
    PARTS: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr, TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: 64 rows of each tile."""
    num_row_tiles, num_column_tiles, depth, out_columns, part_columns = sizes
    x_smem, w_smem, all_staging = smem
    full, empty = bars
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    staging = all_staging.index(which)
    done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _group, first, last, column = _place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER
        )
        num_steps = depth // 64 + _num_tail_steps(column, part_columns, PARTS, FORWARD, RANK_STEPS)
        acc = gl.zeros([64, 256], gl.float32, layout)
        for i in range(num_steps):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            x = x_smem.index(stage).slice(which * 64, 64, 0)
            w = w_smem.index(stage)
            if FORWARD:
                acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=i > 0, is_async=True)
            else:
                acc = warpgroup_mma(x, w, acc, use_acc=i > 0, is_async=True)
            # The product before this one is done with its stage.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if i > 0:
                mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
            done += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
        row = first + which * 64
        halves = acc.to(out_desc.dtype).reshape([64, 2, 128]).permute([0, 2, 1]).split()
        for half in gl.static_range(2):
            tma.store_wait(0)
            gl.thread_barrier()
            staging.store(halves[half])
            at = column + half * 128
            if row + 64 <= last:
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(out_desc, [row, at], staging)
            else:
                gl.thread_barrier()
                _store_rows(out_ptr, staging, row, last, at, out_columns)
    tma.store_wait(0)


@gluon.jit
def _store_rows(out_ptr, staging, row, last, column, out_columns):
    """The rows before `last` of [64, 128], as the last tile of a group has."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    gl.store(
        out_ptr + rows.to(gl.int64)[:, None] * out_columns + columns[None, :],
        staging.load(layout), mask=(rows < last)[:, None],
    )  # fmt: skip


@gluon.jit
def _ring(num: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def _grouped_matmul_hopper_kernel(
    x_desc, w_desc, low_desc, out_desc, factor_0, factor_1, out_ptr, table_ptr, count_ptr,
    group_stride_0, group_stride_1, depth, out_columns, part_columns,
    PARTS: gl.constexpr, RANK: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr,
    TOGETHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    w_shape: gl.constexpr = w_desc.block_type.shape
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, w_shape[0], w_shape[1]], w_desc.layout)
    staging = gl.allocate_shared_memory(dtype, [2, 64, 128], out_desc.layout)
    full, empty = _ring(STAGES, 1), _ring(STAGES, 2)
    fence_async_shared()
    gl.thread_barrier()
    sizes = (gl.load(count_ptr), out_columns // 256, depth, out_columns, part_columns)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    smem, bars = (x_smem, w_smem, staging), (full, empty)
    gl.warp_specialize(
        [
            (_multiply, (
                zero, out_desc, out_ptr, smem, bars, table_ptr, sizes,
                PARTS, RANK_STEPS, FORWARD, TOGETHER, STAGES,
            )),
            (_multiply, (
                one, out_desc, out_ptr, smem, bars, table_ptr, sizes,
                PARTS, RANK_STEPS, FORWARD, TOGETHER, STAGES,
            )),
            (_load_tiles, (
                x_desc, w_desc, low_desc, (factor_0, factor_1), (x_smem, w_smem), bars, table_ptr,
                sizes, (group_stride_0, group_stride_1),
                PARTS, RANK, RANK_STEPS, FORWARD, TOGETHER, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@cache
def _layout(num_dims: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=num_dims)


def _descriptor(x: Tensor, shape: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, shape, _layout(len(shape)))


def fits_hopper(x: Tensor, weight: Tensor, columns: int, factors: Factors | None) -> bool:
    """Whether the kernel takes these: whole tiles of a part's columns and of the depth, and at most
    two pairs, whose factors begin at 16 bytes."""
    tensors = () if factors is None else factors.tensors
    return (
        x.element_size() == 2
        and len(tensors) <= _MOST_PAIRS
        and all(y.data_ptr() % 16 == 0 for y in tensors)
        and columns % COLUMNS == 0
        and x.shape[1] % DEPTH == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def grouped_matmul_hopper(
    x: Tensor, weight: Tensor, tiles: RowTiles, low: Tensor | None, factors: Factors | None,
    shape: tuple[int, int], *, forward: bool, num_parts: int,
) -> Tensor:  # fmt: skip
    """As grouped_matmul, for tensors that fits_hopper, and tiles of ROWS rows."""
    assert tiles.block == ROWS, f"tiles of {tiles.block} rows"
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    x_desc = _descriptor(x, [ROWS, DEPTH])
    w_block = [COLUMNS, DEPTH] if forward else [DEPTH, COLUMNS]
    low_desc, factor_descs, strides = x_desc, [x_desc] * 2, [0, 0]
    parts: tuple[int, ...] = ()
    if low is not None and factors is not None:
        parts = factors.parts
        aligned = [_aligned(y) for y in factors.tensors] if forward else factors.tensors
        low_desc = _descriptor(low, [ROWS, DEPTH])
        # A kernel takes two descriptors of factors; one pair's is given twice.
        factor_descs = [_descriptor(y, [1, *w_block]) for y in aligned] * 2
        strides = [int(len(y) > 1) for y in factors.tensors] * 2
    num_processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    _grouped_matmul_hopper_kernel[(num_processors,)](
        x_desc, _descriptor(weight.view(-1, weight.shape[2]), w_block), low_desc,
        _descriptor(out, [64, 128]), *factor_descs[:2], out, tiles.table, tiles.num_tiles,
        *strides[:2], x.shape[1], shape[1], shape[1] // num_parts, PARTS=parts,
        RANK=16 if factors is None else factors.padded_rank,
        RANK_STEPS=1 if factors is None else triton.cdiv(factors.padded_rank, DEPTH),
        FORWARD=forward, TOGETHER=_TOGETHER, STAGES=_STAGES, num_warps=4,
    )  # fmt: skip
    return out


def _aligned(b: Tensor) -> Tensor:
    """Factors whose rows TMA can find: of whole 16 bytes."""
    missing = -b.shape[2] % 8
    return torch.nn.functional.pad(b, (0, missing)) if missing else b
