"""The grouped product on Hopper: wgmma on tiles that arrive by TMA, in programs that stay.

One warp loads; two warpgroups share each tile of the weight, with 64 rows of their own. The pairs
are one more step of the depth: the low-rank side against the outer factor, of which TMA makes
zeros where a rank has fewer than 64 columns.
"""

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

from glm5.ops.devices import num_processors
from glm5.ops.grouped.hopper_tiles import (
    COLUMNS,
    DEPTH,
    ROWS,
    TOGETHER,
    descriptor,
    has_tail,
    num_tail_steps,
    pair_arguments,
    place,
    ring,
    store_piece,
)
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_tiles import RowTiles

_STAGES = 4


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
        _row_tile, group, first, _last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 256
        )
        for k in range(0, depth, 64):
            stage = done % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [first, k], bar, x_smem.index(stage))
            corner = [group * out_columns + column, k] if FORWARD else [group * depth + k, column]
            tma.async_copy_global_to_shared(w_desc, corner, bar, w_smem.index(stage))
            done += 1
        for p in gl.static_range(len(PARTS)):
            if has_tail(column, part_columns, PARTS[p], FORWARD):
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
        _row_tile, _group, first, last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 256
        )
        num_steps = depth // 64 + num_tail_steps(column, part_columns, PARTS, FORWARD, RANK_STEPS)
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
        halves = acc.reshape([64, 2, 128]).permute([0, 2, 1]).split()
        for half in gl.static_range(2):
            at = column + half * 128
            store_piece(halves[half], staging, out_desc, out_ptr, row, last, at, out_columns)
    tma.store_wait(0)


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
    full, empty = ring(STAGES, 1), ring(STAGES, 2)
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


def grouped_matmul_hopper(
    x: Tensor, weight: Tensor, tiles: RowTiles, low: Tensor | None, factors: Factors | None,
    shape: tuple[int, int], *, forward: bool, num_parts: int,
) -> Tensor:  # fmt: skip
    """As grouped_matmul, for tensors that fits_hopper, and tiles of ROWS rows."""
    assert tiles.block == ROWS, f"tiles of {tiles.block} rows"
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    w_block = [COLUMNS, DEPTH] if forward else [DEPTH, COLUMNS]
    _grouped_matmul_hopper_kernel[(num_processors(x),)](
        descriptor(x, [ROWS, DEPTH]), descriptor(weight.view(-1, weight.shape[2]), w_block),
        out_desc=descriptor(out, [64, 128]), out_ptr=out, table_ptr=tiles.table,
        count_ptr=tiles.num_tiles, depth=x.shape[1], out_columns=shape[1],
        part_columns=shape[1] // num_parts, FORWARD=forward, TOGETHER=TOGETHER, STAGES=_STAGES,
        num_warps=4,
        **pair_arguments(x, low, factors, rows=ROWS, factor=[COLUMNS, DEPTH], forward=forward),
    )  # fmt: skip
    return out
