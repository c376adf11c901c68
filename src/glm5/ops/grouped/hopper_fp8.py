"""The grouped product in float8 on Hopper: rows with a scale for each piece of 128, weights with
one for each block of 128 x 128, as serving engines multiply (arXiv 2412.19437, section 3.3.2).

Each 128 of the depth is one product of the tensor cores, which is scaled and added in fp32. They
read both operands along the depth alone. In the forward direction the weight lies so; in the other
one a warpgroup turns each of its tiles round in shared memory. The pairs stay in 2-byte dtypes.
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
from glm5.ops.grouped.triton_rows import quantise_rows_fused
from glm5.ops.grouped.triton_tiles import RowTiles

# Of the depth, one step.
_STEP = 128


@gluon.jit
def _load_tiles(
    x_desc, scale_desc, w_desc, low_desc, factor_descs, smem, bars, table_ptr, sizes,
    group_strides, PARTS: gl.constexpr, RANK: gl.constexpr, RANK_STEPS: gl.constexpr,
    FORWARD: gl.constexpr, TOGETHER: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    """Producer: x and the weight of every step, forward in one ring of stages; of the pairs, in the
    other direction the low-rank side alone."""
    num_row_tiles, num_column_tiles, depth, out_columns, part_columns = sizes
    x_smem, scale_smem, w_smem = smem
    full, empty = bars[0], bars[1]
    done = 0
    w_done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, group, first, _last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 128
        )
        for k in range(0, depth, 128):
            if not FORWARD:
                stage = w_done % W_STAGES
                bar = bars[2].index(stage)
                mbarrier.wait(bars[3].index(stage), (w_done // W_STAGES & 1) ^ 1)
                mbarrier.expect(bar, w_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    w_desc, [group * depth + k, column], bar, w_smem.index(stage)
                )
                w_done += 1
            stage = done % X_STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (done // X_STAGES & 1) ^ 1)
            mbarrier.expect(
                bar, x_desc.block_type.nbytes + scale_desc.block_type.nbytes
                + (w_desc.block_type.nbytes if FORWARD else 0),
            )  # fmt: skip
            tma.async_copy_global_to_shared(x_desc, [first, k], bar, x_smem.index(stage))
            tma.async_copy_global_to_shared(
                scale_desc, [k // 128, row_tile * 256], bar, scale_smem.index(stage)
            )
            if FORWARD:
                tma.async_copy_global_to_shared(
                    w_desc, [group * out_columns + column, k], bar, w_smem.index(stage)
                )
            done += 1
        for p in gl.static_range(len(PARTS)):
            if has_tail(column, part_columns, PARTS[p], FORWARD):
                for step in gl.static_range(RANK_STEPS):
                    stage = done % X_STAGES
                    bar = full.index(stage)
                    mbarrier.wait(empty.index(stage), (done // X_STAGES & 1) ^ 1)
                    mbarrier.expect(
                        bar, low_desc.block_type.nbytes
                        + (factor_descs[p].block_type.nbytes if FORWARD else 0),
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        low_desc, [first, p * RANK + step * 64], bar,
                        x_smem.index(stage)._reinterpret(
                            low_desc.dtype, low_desc.block_type.shape, low_desc.layout
                        ),
                    )  # fmt: skip
                    if FORWARD:
                        _load_factor(
                            factor_descs[p], [group * group_strides[p],
                            column - PARTS[p] * part_columns, step * 64],
                            bar, w_smem.index(stage),
                        )  # fmt: skip
                    done += 1


@gluon.jit
def _load_factor(desc, corner, bar, buffer):
    """A tile of a pair's factor in place of one of the weight, of as many bytes."""
    tma.async_copy_global_to_shared(
        desc, corner, bar, buffer._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    )


@gluon.jit
def _turn(
    factor_descs, smem, bars, table_ptr, sizes, group_strides,
    PARTS: gl.constexpr, RANK_STEPS: gl.constexpr, TOGETHER: gl.constexpr,
    Q_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    """In between: tiles [columns, depth] of the weight from tiles [depth, columns].

    A thread takes 16 columns of depths r, r + 32, r + 64 and r + 96, and puts those four side by
    side, so that neither its reads nor its writes meet others in a bank of memory. The depth comes
    out in the order in which quantise_rows_fused lays the rows.
    """
    num_row_tiles, num_column_tiles, depth, _out_columns, _part_columns = sizes
    q_smem, w_smem = smem
    q_full, q_empty, w_full, w_empty = bars
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [32, 0], [64, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[128, 64],
    )
    done = 0
    q_done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _row_tile, group, _first, _last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 128
        )
        for _k in range(0, depth, 128):
            q_stage, stage = q_done % Q_STAGES, done % W_STAGES
            mbarrier.wait(q_full.index(q_stage), q_done // Q_STAGES & 1)
            mbarrier.wait(w_empty.index(stage), (done // W_STAGES & 1) ^ 1)
            for part in gl.static_range(2):
                q = q_smem.index(q_stage).slice(part * 64, 64, 1).load(layout)
                turned = q.reshape([4, 32, 64]).permute([2, 1, 0]).reshape([64, 128])
                w_smem.index(stage).slice(part * 64, 64, 0).store(turned)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(q_empty.index(q_stage), count=1)
            mbarrier.arrive(w_full.index(stage), count=1)
            q_done += 1
            done += 1
        for p in gl.static_range(len(PARTS)):
            for step in gl.static_range(RANK_STEPS):
                stage = done % W_STAGES
                mbarrier.wait(w_empty.index(stage), (done // W_STAGES & 1) ^ 1)
                bar = w_full.index(stage)
                mbarrier.expect(bar, factor_descs[p].block_type.nbytes)
                _load_factor(
                    factor_descs[p], [group * group_strides[p], step * 64, column], bar,
                    w_smem.index(stage),
                )  # fmt: skip
                done += 1


@gluon.jit
def _wait_full(bars, done, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr):
    """Until what step `done` multiplies has come; x and the weight have one ring, or two."""
    mbarrier.wait(bars[0].index(done % X_STAGES), done // X_STAGES & 1)
    if len(bars) == 4:
        mbarrier.wait(bars[2].index(done % W_STAGES), done // W_STAGES & 1)


@gluon.jit
def _give_back(bars, done, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr):
    """What step `done` has multiplied may be overwritten."""
    mbarrier.arrive(bars[1].index(done % X_STAGES), count=1)
    if len(bars) == 4:
        mbarrier.arrive(bars[3].index(done % W_STAGES), count=1)


@gluon.jit
def _scales(
    scale_smem, table, done, block, layout: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, NUM: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """What a step's products of both 64 rows are scaled by; the first twice where NUM is 1."""
    w_scale = scale_of(table, block, layout)
    x_scales = scale_smem.index(done % X_STAGES)._reinterpret(gl.float32, [256], table.layout)
    scale_0 = x_scales.slice(FIRST, 64).load(layout) * w_scale
    scale_1 = scale_0
    if NUM == 2:
        scale_1 = x_scales.slice(SECOND, 64).load(layout) * w_scale
    return scale_0, scale_1


@gluon.jit
def _product(
    x_smem, w_smem, done, row: gl.constexpr, nothing, X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
):  # fmt: skip
    """x [64, 128] w [128, 128]^T of step `done` in float8, in flight; of x the rows from `row`."""
    x = x_smem.index(done % X_STAGES).slice(row, 64, 0)
    w = w_smem.index(done % W_STAGES).permute((1, 0))
    return warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_tail(acc, low, factor):
    """acc + low [64, 64] factor [64, 128] of a 2-byte dtype.

    Added in place by an instruction that stays in its place: the compiler moves pure sums behind
    the next wait, keeps both products until then, and has no registers for them.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    nothing = gl.zeros([64, 128], gl.float32, layout)
    part = warpgroup_mma(low, factor, nothing, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    part = gl.convert_layout(part, acc.type.layout)
    return gl.inline_asm_elementwise(
        "add.f32 $0, $1, $2;", "=f,f,f", [acc, part], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _accumulate(
    which, done, low_desc, scales, stride, num_blocks, smem, bars, num_steps, num_tail,
    NUM: gl.constexpr, FORWARD: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    """Sums [64, 128] of this warpgroup's rows of a tile's first half, and where NUM is 2 of its
    second half, else zeros."""
    x_smem, scale_smem, w_smem, table = smem
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    FIRST: gl.constexpr = which * 64
    SECOND: gl.constexpr = FIRST + 128
    nothing = gl.zeros([64, 128], gl.float32, layout)
    acc_0 = gl.zeros([64, 128], gl.float32, layout)
    acc_1 = gl.zeros([64, 128], gl.float32, layout)
    for i in range(num_steps):
        if i % 128 == 0:
            fill_scale_table(table, scales + i * stride, stride, num_blocks - i)
        _wait_full(bars, done, X_STAGES, W_STAGES)
        scale_0, scale_1 = _scales(
            scale_smem, table, done, i, row_layout, FIRST, SECOND, NUM, X_STAGES
        )
        part = _product(x_smem, w_smem, done, FIRST, nothing, X_STAGES, W_STAGES)
        if NUM == 2:
            part = warpgroup_mma_wait(0, deps=[part])
            acc_0 += part * scale_0[:, None]
            part = _product(x_smem, w_smem, done, SECOND, nothing, X_STAGES, W_STAGES)
        part = warpgroup_mma_wait(0, deps=[part])
        _give_back(bars, done, X_STAGES, W_STAGES)
        if NUM == 2:
            acc_1 += part * scale_1[:, None]
        else:
            acc_0 += part * scale_0[:, None]
        done += 1
    for _i in range(num_tail):
        x_stage, w_stage = done % X_STAGES, done % W_STAGES
        _wait_full(bars, done, X_STAGES, W_STAGES)
        low = x_smem.index(x_stage)._reinterpret(
            low_desc.dtype, low_desc.block_type.shape, low_desc.layout
        )
        factor = w_smem.index(w_stage)._reinterpret(
            low_desc.dtype, [128, 64] if FORWARD else [64, 128], low_desc.layout
        )
        if FORWARD:
            factor = factor.permute((1, 0))
        acc_0 = _add_tail(acc_0, low.slice(FIRST, 64, 0), factor)
        if NUM == 2:
            acc_1 = _add_tail(acc_1, low.slice(SECOND, 64, 0), factor)
        _give_back(bars, done, X_STAGES, W_STAGES)
        done += 1
    return acc_0, acc_1


@gluon.jit
def _store(sums, staging, out_desc, out_ptr, row, last, column, out_columns):
    """[64, 128] in pieces as wide as the memory on the way."""
    if staging.shape[1] == 128:
        store_piece(sums, staging, out_desc, out_ptr, row, last, column, out_columns)
    else:
        halves = sums.reshape([64, 2, 64]).permute([0, 2, 1]).split()
        for half in gl.static_range(2):
            at = column + half * 64
            store_piece(halves[half], staging, out_desc, out_ptr, row, last, at, out_columns)


@gluon.jit
def _multiply(
    which, low_desc, out_desc, out_ptr, grid, smem, bars, table_ptr, sizes,
    PARTS: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr, TOGETHER: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: 64 rows of each half of a tile, so that a tile of one half costs half."""
    num_row_tiles, num_column_tiles, depth, out_columns, part_columns = sizes
    scales_ptr, grid_rows, grid_columns = grid
    x_smem, scale_smem, w_smem, all_staging, tables = smem
    staging = all_staging.index(which)
    operands = (x_smem, scale_smem, w_smem, tables.index(which))
    done = 0
    num_tiles = num_row_tiles * num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _row_tile, group, first, last, column = place(
            tile, table_ptr, num_row_tiles, num_column_tiles, TOGETHER, 128
        )
        row = first + which * 64
        scales = scales_ptr + group * grid_rows * grid_columns
        if FORWARD:
            scales += column // 128 * grid_columns
            stride, num_blocks = 1, grid_columns
        else:
            scales += column // 128
            stride, num_blocks = grid_columns, grid_rows
        num_steps = gl.cdiv(depth, 128)
        num_tail = num_tail_steps(column, part_columns, PARTS, FORWARD, RANK_STEPS)
        if first + 128 < last:
            acc_0, acc_1 = _accumulate(
                which, done, low_desc, scales, stride, num_blocks, operands, bars, num_steps,
                num_tail, 2, FORWARD, X_STAGES, W_STAGES,
            )  # fmt: skip
            _store(acc_0, staging, out_desc, out_ptr, row, last, column, out_columns)
            second = row + 128
            if second < last:
                _store(acc_1, staging, out_desc, out_ptr, second, last, column, out_columns)
        else:
            acc_0, _acc_1 = _accumulate(
                which, done, low_desc, scales, stride, num_blocks, operands, bars, num_steps,
                num_tail, 1, FORWARD, X_STAGES, W_STAGES,
            )  # fmt: skip
            if row < last:
                _store(acc_0, staging, out_desc, out_ptr, row, last, column, out_columns)
        done += num_steps + num_tail
    tma.store_wait(0)


@gluon.jit
def _fp8_matmul_hopper_kernel(
    x_desc, scale_desc, w_desc, low_desc, out_desc, factor_0, factor_1,
    scales_ptr, out_ptr, table_ptr, count_ptr,
    group_stride_0, group_stride_1, depth, out_columns, part_columns, grid_rows,
    grid_columns,
    PARTS: gl.constexpr, RANK: gl.constexpr, RANK_STEPS: gl.constexpr, FORWARD: gl.constexpr,
    TOGETHER: gl.constexpr,
    X_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    fp8: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(fp8, [X_STAGES, 256, 128], x_desc.layout)
    scale_smem = gl.allocate_shared_memory(gl.float32, [X_STAGES, 1, 256], scale_desc.layout)
    w_smem = gl.allocate_shared_memory(fp8, [W_STAGES, 128, 128], x_desc.layout)
    staging = gl.allocate_shared_memory(
        out_desc.dtype, [2, 64, out_desc.block_type.shape[1]], out_desc.layout
    )
    x_bars = (ring(X_STAGES, 1), ring(X_STAGES, 2))
    sizes = (gl.load(count_ptr), gl.cdiv(out_columns, 128), depth, out_columns, part_columns)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    smem = (x_smem, scale_smem, w_smem, staging, scale_tables(2))
    grid = (scales_ptr, grid_rows, grid_columns)
    factors, strides = (factor_0, factor_1), (group_stride_0, group_stride_1)
    if FORWARD:
        fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_multiply, (
                    zero, low_desc, out_desc, out_ptr, grid, smem, x_bars, table_ptr,
                    sizes, PARTS, RANK_STEPS, FORWARD, TOGETHER, X_STAGES, W_STAGES,
                )),
                (_multiply, (
                    one, low_desc, out_desc, out_ptr, grid, smem, x_bars, table_ptr,
                    sizes, PARTS, RANK_STEPS, FORWARD, TOGETHER, X_STAGES, W_STAGES,
                )),
                (_load_tiles, (
                    x_desc, scale_desc, w_desc, low_desc, factors, (x_smem, scale_smem, w_smem),
                    x_bars, table_ptr, sizes, strides,
                    PARTS, RANK, RANK_STEPS, FORWARD, TOGETHER, X_STAGES, W_STAGES,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        q_smem = gl.allocate_shared_memory(fp8, [Q_STAGES, 128, 128], w_desc.layout)
        q_bars = (ring(Q_STAGES, 1), ring(Q_STAGES, 1))
        w_bars = (ring(W_STAGES, 1), ring(W_STAGES, 2))
        bars = x_bars + w_bars
        fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_multiply, (
                    zero, low_desc, out_desc, out_ptr, grid, smem, bars, table_ptr,
                    sizes, PARTS, RANK_STEPS, FORWARD, TOGETHER, X_STAGES, W_STAGES,
                )),
                (_multiply, (
                    one, low_desc, out_desc, out_ptr, grid, smem, bars, table_ptr,
                    sizes, PARTS, RANK_STEPS, FORWARD, TOGETHER, X_STAGES, W_STAGES,
                )),
                (_turn, (
                    factors, (q_smem, w_smem), q_bars + w_bars, table_ptr,
                    sizes, strides, PARTS, RANK_STEPS, TOGETHER, Q_STAGES, W_STAGES,
                )),
                (_load_tiles, (
                    x_desc, scale_desc, w_desc, low_desc, factors, (x_smem, scale_smem, q_smem),
                    x_bars + q_bars, table_ptr, sizes, strides,
                    PARTS, RANK, RANK_STEPS, FORWARD, TOGETHER, X_STAGES, Q_STAGES,
                )),
            ],
            [4, 4, 1],
            [208, 64, 32],
        )  # fmt: skip


def stages(*, forward: bool) -> tuple[int, int, int]:
    """Of x, of tiles to be turned, and of tiles as they are multiplied."""
    return (4, 0, 4) if forward else (3, 2, 3)


def fp8_matmul_hopper(
    x: Tensor, weight: BlockScaled, tiles: RowTiles, low: Tensor | None, factors: Factors | None,
    shape: tuple[int, int], *, forward: bool, num_parts: int,
) -> Tensor:  # fmt: skip
    """As grouped_matmul with rows and weights in float8, for tensors that fit_hopper, and tiles of
    SCALED_ROWS rows."""
    assert tiles.block == SCALED_ROWS, f"tiles of {tiles.block} rows"
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    rows = quantise_rows_fused(x, tiles, turned=not forward)
    x_stages, q_stages, w_stages = stages(forward=forward)
    factor = [SCALED_COLUMNS, DEPTH]
    _fp8_matmul_hopper_kernel[(num_processors(x),)](
        descriptor(rows.values, [SCALED_ROWS, _STEP]), descriptor(rows.scales, [1, SCALED_ROWS], 0),
        descriptor(weight.values.view(-1, weight.shape[2]), [SCALED_COLUMNS, _STEP]),
        out_desc=descriptor(out, [64, 64 if forward else 128]), scales_ptr=weight.scales,
        out_ptr=out, table_ptr=tiles.table, count_ptr=tiles.num_tiles, depth=x.shape[1],
        out_columns=shape[1], part_columns=shape[1] // num_parts,
        grid_rows=weight.scales.shape[1], grid_columns=weight.scales.shape[2],
        FORWARD=forward, TOGETHER=SCALED_TOGETHER,
        X_STAGES=x_stages, Q_STAGES=q_stages, W_STAGES=w_stages, num_warps=4,
        **pair_arguments(x, low, factors, rows=SCALED_ROWS, factor=factor, forward=forward),
    )  # fmt: skip
    return out
