"""The grouped product with weights in float8 on Hopper, exact: as if they were 2-byte.

It computes y^T = W x^T: a tile of the weight is the operand that wgmma takes from registers, so
that the warpgroup that multiplies makes w = value * scale there, rounded once, as dequantising the
weight beforehand would. One warp loads; two warpgroups have 64 columns of the result each, and 256
rows, for which a value is made once.
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

from glm5.ops.block_scaled import BlockScaled
from glm5.ops.devices import num_processors
from glm5.ops.grouped.hopper_tiles import (
    DEPTH,
    SCALED_COLUMNS,
    SCALED_ROWS,
    SCALED_TOGETHER,
    descriptor,
    fill_scale_table,
    has_tail,
    num_tail_steps,
    pair_arguments,
    place,
    ring,
    scale_of,
    scale_tables,
    store_piece,
)
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_tiles import RowTiles

STAGES = 5


@gluon.jit
def _load_tiles(
    x_desc, q_desc, low_desc, factor_descs, smem, bars, table_ptr, sizes, group_strides,
    PARTS: gl.constexpr, RANK: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr,
    TOGETHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer: every step of every tile through a ring of stages.

    The factors are twice as wide as the float8 weights: they come in two steps, a half each.
    """
    num_row_tiles, num_column_tiles, depth, out_columns, part_columns = sizes
    x_smem, q_smem = smem
    full, empty = bars
    done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _row_tile, group, first, _last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 128
        )
        for k in range(0, depth, 64):
            stage = done % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, x_desc.block_type.nbytes + q_desc.block_type.nbytes)
            corner = [group * out_columns + column, k] if FORWARD else [group * depth + k, column]
            tma.async_copy_global_to_shared(q_desc, corner, bar, q_smem.index(stage))
            tma.async_copy_global_to_shared(x_desc, [first, k], bar, x_smem.index(stage))
            done += 1
        for p in gl.static_range(len(PARTS)):
            if has_tail(column, part_columns, PARTS[p], FORWARD):
                for step in gl.static_range(RANK_STEPS):
                    for half in gl.static_range(2):
                        stage = done % STAGES
                        bar = full.index(stage)
                        mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
                        mbarrier.expect(
                            bar, low_desc.block_type.nbytes + factor_descs[p].block_type.nbytes
                        )
                        tma.async_copy_global_to_shared(
                            low_desc, [first, p * RANK + step * 64], bar, x_smem.index(stage)
                        )
                        at = column + half * 64
                        in_part = at - PARTS[p] * part_columns if FORWARD else step * 64
                        inner = step * 64 if FORWARD else at
                        tma.async_copy_global_to_shared(
                            factor_descs[p], [group * group_strides[p], in_part, inner], bar,
                            q_smem.index(stage)._reinterpret(
                                low_desc.dtype, factor_descs[p].block_type.shape,
                                factor_descs[p].layout,
                            ),
                        )  # fmt: skip
                        done += 1


@gluon.jit
def _load(tile, layout: gl.constexpr, FORWARD: gl.constexpr):
    """A tile of 64 columns of the weight, or of a factor, for `_operand`.

    Where the columns lie side by side in memory, a thread that needs columns c and c + 8 takes two
    neighbours: [depth, columns].
    """
    if FORWARD:
        return tile.load(layout)
    else:
        neighbours: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]],
            lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
            warp_bases=[[0, 16], [0, 32]],
            block_bases=[],
            shape=[64, 64],
        )
        return tile.load(neighbours)


@gluon.jit
def _operand(x, layout: gl.constexpr, FORWARD: gl.constexpr):
    """What `_load` gave as wgmma takes it, [columns, depth]; no value leaves its thread.

    From [depth, columns] the columns come out in another order, which `_in_order` undoes.
    """
    if FORWARD:
        return x
    else:
        x = x.reshape([64, 4, 8, 2]).permute([1, 3, 2, 0]).reshape([64, 64])
        return gl.convert_layout(x, layout)


@gluon.jit
def _in_order(x, FORWARD: gl.constexpr):
    """[64, rows] with the columns as they are in memory, from the order of `_operand`."""
    if FORWARD:
        return x
    else:
        return x.reshape([4, 2, 8, x.shape[1]]).permute([0, 2, 1, 3]).reshape([64, x.shape[1]])


@gluon.jit
def _weight(q_smem, stage, which, table, block, layout: gl.constexpr, FORWARD: gl.constexpr, dtype):
    """The tile of a stage in registers, dequantised."""
    q = _load(q_smem.index(stage).slice(which * 64, 64, 0 if FORWARD else 1), layout, FORWARD)
    scale = scale_of(table, block, gl.SliceLayout(1, q.type.layout))
    # in pairs as they were loaded; only then in pairs as they are multiplied
    return _operand(q.to(gl.float32) * scale[:, None], layout, FORWARD).to(dtype)


@gluon.jit
def _accumulate(
    which, done, scales, stride, num_blocks, smem, bars, num_steps, num_tail, ROWS: gl.constexpr,
    FORWARD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums [64, ROWS] of this warpgroup's columns of a tile and of the first ROWS of its rows."""
    x_smem, q_smem, table = smem
    full, empty = bars
    dtype: gl.constexpr = x_smem.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    factor_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    fill_scale_table(table, scales, stride, num_blocks)
    acc = gl.zeros([64, ROWS], gl.float32, layout)
    mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
    w = _weight(q_smem, done % STAGES, which, table, 0, operand, FORWARD, dtype)
    for i in range(num_steps):
        stage = done % STAGES
        x = x_smem.index(stage).slice(0, ROWS, 0)
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=i > 0, is_async=True)
        next_w = w
        done += 1
        if i + 1 < num_steps:
            ahead = (i + 1) // 2
            if (i + 1) % 256 == 0:
                fill_scale_table(table, scales + ahead * stride, stride, num_blocks - ahead)
            ready = done % STAGES
            mbarrier.wait(full.index(ready), done // STAGES & 1)
            next_w = _weight(q_smem, ready, which, table, ahead, operand, FORWARD, dtype)
        # The product reads w until it is done.
        acc, w = warpgroup_mma_wait(0, deps=[acc, w])
        w = next_w
        mbarrier.arrive(empty.index(stage), count=1)
    for _i in range(num_tail):
        for half in gl.static_range(2):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            if half == which:
                factor = q_smem.index(stage)._reinterpret(dtype, [64, 64], factor_layout)
                low = x_smem.index(stage).slice(0, ROWS, 0).permute((1, 0))
                w = _operand(_load(factor, operand, FORWARD), operand, FORWARD)
                acc = warpgroup_mma(w, low, acc, is_async=True)
                acc, w = warpgroup_mma_wait(0, deps=[acc, w])
            mbarrier.arrive(empty.index(stage), count=1)
            done += 1
    return acc


@gluon.jit
def _store(
    acc, staging, out_desc, out_ptr, first, last, column, out_columns, FORWARD: gl.constexpr
):
    """The sums of 128 rows."""
    pieces = acc.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    for i in gl.static_range(2):
        row = first + i * 64
        if row < last:
            store_piece(
                _in_order(pieces[i], FORWARD).permute([1, 0]), staging, out_desc, out_ptr,
                row, last, column, out_columns,
            )  # fmt: skip


@gluon.jit
def _multiply(
    which, out_desc, out_ptr, grid, smem, bars, table_ptr, sizes,
    PARTS: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr, TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: 64 columns of each tile."""
    num_row_tiles, num_column_tiles, depth, out_columns, part_columns = sizes
    scales_ptr, grid_rows, grid_columns = grid
    x_smem, q_smem, all_staging, tables = smem
    operands, staging = (x_smem, q_smem, tables.index(which)), all_staging.index(which)
    done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _row_tile, group, first, last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 128
        )
        num_steps = gl.cdiv(depth, 64)
        num_tail = num_tail_steps(column, part_columns, PARTS, FORWARD, RANK_STEPS)
        scales = scales_ptr + group * grid_rows * grid_columns
        if FORWARD:
            scales += column // 128 * grid_columns
            stride, num_blocks = 1, grid_columns
        else:
            scales += column // 128
            stride, num_blocks = grid_columns, grid_rows
        own = column + which * 64
        # the last tile of a group may have half of the rows, and then costs half
        if first + 128 < last:
            sums = _accumulate(
                which, done, scales, stride, num_blocks, operands, bars, num_steps, num_tail, 256,
                FORWARD, STAGES,
            )  # fmt: skip
            halves = sums.reshape([64, 2, 128]).permute([0, 2, 1]).split()
            for half in gl.static_range(2):
                _store(
                    halves[half], staging, out_desc, out_ptr, first + half * 128, last, own,
                    out_columns, FORWARD,
                )  # fmt: skip
        else:
            few = _accumulate(
                which, done, scales, stride, num_blocks, operands, bars, num_steps, num_tail, 128,
                FORWARD, STAGES,
            )  # fmt: skip
            _store(few, staging, out_desc, out_ptr, first, last, own, out_columns, FORWARD)
        done += num_steps + 2 * num_tail
    tma.store_wait(0)


@gluon.jit
def _exact_matmul_hopper_kernel(
    x_desc, q_desc, low_desc, out_desc, factor_0, factor_1,
    scales_ptr, out_ptr, table_ptr, count_ptr,
    group_stride_0, group_stride_1, depth, out_columns, part_columns, grid_rows, grid_columns,
    PARTS: gl.constexpr, RANK: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr,
    TOGETHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    q_shape: gl.constexpr = q_desc.block_type.shape
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, 256, 64], x_desc.layout)
    q_smem = gl.allocate_shared_memory(
        q_desc.dtype, [STAGES, q_shape[0], q_shape[1]], q_desc.layout
    )
    staging = gl.allocate_shared_memory(dtype, [2, 64, 64], out_desc.layout)
    full, empty = ring(STAGES, 1), ring(STAGES, 2)
    fence_async_shared()
    gl.thread_barrier()
    sizes = (gl.load(count_ptr), gl.cdiv(out_columns, 128), depth, out_columns, part_columns)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    smem, bars = (x_smem, q_smem, staging, scale_tables(2)), (full, empty)
    grid = (scales_ptr, grid_rows, grid_columns)
    gl.warp_specialize(
        [
            (_multiply, (
                zero, out_desc, out_ptr, grid, smem, bars, table_ptr, sizes,
                PARTS, RANK_STEPS, FORWARD, TOGETHER, STAGES,
            )),
            (_multiply, (
                one, out_desc, out_ptr, grid, smem, bars, table_ptr, sizes,
                PARTS, RANK_STEPS, FORWARD, TOGETHER, STAGES,
            )),
            (_load_tiles, (
                x_desc, q_desc, low_desc, (factor_0, factor_1), (x_smem, q_smem), bars, table_ptr,
                sizes, (group_stride_0, group_stride_1),
                PARTS, RANK, RANK_STEPS, FORWARD, TOGETHER, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def exact_matmul_hopper(
    x: Tensor, weight: BlockScaled, tiles: RowTiles, low: Tensor | None, factors: Factors | None,
    shape: tuple[int, int], *, forward: bool, num_parts: int,
) -> Tensor:  # fmt: skip
    """As grouped_matmul on the dequantised weight, for tensors that fit_hopper, and tiles of
    SCALED_ROWS rows."""
    assert tiles.block == SCALED_ROWS, f"tiles of {tiles.block} rows"
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    box = [SCALED_COLUMNS, DEPTH] if forward else [DEPTH, SCALED_COLUMNS]
    values = weight.values.view(-1, weight.shape[2])
    _exact_matmul_hopper_kernel[(num_processors(x),)](
        descriptor(x, [SCALED_ROWS, DEPTH]), descriptor(values, box, 64 if forward else 128),
        out_desc=descriptor(out, [64, 64]), scales_ptr=weight.scales, out_ptr=out,
        table_ptr=tiles.table, count_ptr=tiles.num_tiles, depth=x.shape[1], out_columns=shape[1],
        part_columns=shape[1] // num_parts, grid_rows=weight.scales.shape[1],
        grid_columns=weight.scales.shape[2], FORWARD=forward, TOGETHER=SCALED_TOGETHER,
        STAGES=STAGES, num_warps=4,
        **pair_arguments(x, low, factors, rows=SCALED_ROWS, factor=[64, DEPTH], forward=forward),
    )  # fmt: skip
    return out
