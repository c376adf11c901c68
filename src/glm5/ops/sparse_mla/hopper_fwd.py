"""Forward of sparse_mla for Hopper in Gluon: bf16, d_qk 576, d_v 512, 64 rows per program.

Rows are heads of one query, or the few heads of several queries over the union of their keys.

Four warps gather keys into two buffers, one tile of 64 keys each. Two groups of four warps share
the rest: group g computes the probabilities of every second tile, and columns 256 g .. 256 g + 256
of the output for all tiles. So one group multiplies while the other takes exponentials. A group
keeps its own probabilities in registers and hands them to the other through shared memory.
From there they are copied to memory too, where they are kept (tile_probs.py says for what).
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glm5.ops.sparse_mla.hopper_gather import copy_columns, copy_heads, key_rows
from glm5.ops.sparse_mla.hopper_store import store_heads
from glm5.ops.sparse_mla.selection import Selection
from glm5.ops.sparse_mla.tile_probs import TileProbs, TileShape

_ROWS = 64
_S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_S_ROW = gl.constexpr(gl.SliceLayout(1, _S_LAYOUT))
_O_ROW = gl.constexpr(gl.SliceLayout(1, _O_LAYOUT))


@gluon.jit
def _gather(q, kv, indices, length, num_heads, smem, bars):
    """Copy the queries once, then the tiles of keys into the two buffers in turn."""
    q_v, q_tail, all_k_v, all_k_tail, _p, _row_max, _row_sum = smem
    k_full, k_free, _p_full, _sum_full = bars
    num_tiles = gl.cdiv(length, 128) * 2
    if num_tiles > 0:
        copy_heads(q, num_heads, q_v.index(0), 512, 576)
        copy_heads(q + 512, num_heads, q_tail.index(0), 64, 576)
    for tile in range(0, num_tiles):
        buffer = tile & 1
        k_v, k_tail = all_k_v.index(buffer), all_k_tail.index(buffer)
        rows, is_key = key_rows(kv, indices, tile * 64, length)
        for half in gl.static_range(2):
            # The first round finds the buffers free.
            mbarrier.wait(k_free.index(2 * buffer + half), ((tile >> 1) & 1) ^ 1)
            copy_columns(rows, is_key, k_v.slice(half * 256, 256, 1), half * 256, 256)
            if half == 1:
                copy_columns(rows, is_key, k_tail, 512, 64)
            # Fires when all copies so far have landed: the first time, the queries too.
            async_copy.mbarrier_arrive(k_full.index(2 * buffer + half), increment_count=False)


@gluon.jit
def _rescaled(acc, old_max, new_max):
    """acc times exp(old_max - new_max), 0 where there was no key before."""
    factor = gl.exp2(old_max - gl.where(new_max == float("-inf"), 0.0, new_max))
    return acc * gl.convert_layout(factor, _O_ROW)[:, None]


@gluon.jit
def _release(bar):
    """Tell that all warps of this group are done with what bar guards."""
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _publish(probs, row_max, p, p_row_max, bar):
    """Hand the probabilities of a tile, and the maximum they refer to, to the other group."""
    p.store(probs)
    p_row_max.store(row_max)
    fence_async_shared()
    _release(bar)


@gluon.jit
def _begin_to_keep(probs, p, tile):
    """Begin to copy the other group's probabilities of a tile to memory; it may not change p yet.

    probs describes [tiles * 64, 64].
    """
    tma.async_copy_shared_to_global(probs, [tile * 64, 0], p)


@gluon.jit
def _attend(
    results,
    kept,
    members,
    sizes,
    smem,
    bars,
    packed: gl.constexpr,
    keeps: gl.constexpr,
    group: gl.constexpr,
):
    out, lse = results
    kept_probs, kept_maxima, first_tile = kept
    length, scale_log2, num_heads, heads_per_query = sizes
    all_q_v, all_q_tail, k_v, k_tail, all_p, p_row_max, sums = smem
    k_full, k_free, p_full, sum_full = bars
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, _S_LAYOUT)) + group * 64
    p_layout: gl.constexpr = gl.DotOperandLayout(0, _O_LAYOUT, 2)
    row_max = gl.full([64], float("-inf"), gl.float32, _S_ROW)
    # Of this group's own tiles, in units of exp(sum_max).
    row_sum = gl.zeros([64], gl.float32, _S_ROW)
    sum_max = row_max
    acc = gl.zeros([64, 256], gl.float32, _O_LAYOUT)
    query = gl.arange(0, 64, layout=_S_ROW) // heads_per_query
    for pair in range(0, gl.cdiv(length, 128)):
        phase = pair & 1
        # 0, which only this line knows: were the addresses constant, the compiler would keep
        # dozens of matrix descriptors in registers across the loop, and spill them.
        zero = pair >> 30
        q_v, q_tail, p = all_q_v.index(zero), all_q_tail.index(zero), all_p.index(zero)
        v_0 = k_v.index(zero).slice(group * 256, 256, 1)
        v_1 = k_v.index(zero + 1).slice(group * 256, 256, 1)
        places = pair * 128 + columns
        if packed:
            bits = gl.load(members + places, mask=places < length, other=0)
        s = gl.zeros([64, 64], gl.float32, _S_LAYOUT)
        k = k_v.index(zero + group)
        for half in gl.static_range(2):
            mbarrier.wait(k_full.index(2 * group + half), phase)
            fence_async_shared()
            k_t = k.slice(half * 256, 256, 1).permute((1, 0))
            q_half = q_v.slice(half * 256, 256, 1)
            s = warpgroup_mma(q_half, k_t, s, use_acc=half > 0, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.index(zero + group).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if packed:
            is_key = ((bits[None, :] >> query[:, None]) & 1) != 0
            s = gl.where(is_key, s * scale_log2, float("-inf"))
        else:
            s = gl.where((places < length)[None, :], s * scale_log2, float("-inf"))
        tile_max = gl.max(s, 1)
        if group == 1:
            # The first tile of the pair comes first.
            mbarrier.wait(k_full.index(1), phase)
            mbarrier.wait(p_full.index(0), phase)
            fence_async_shared()
            if keeps:
                _begin_to_keep(kept_probs, p, first_tile + pair * 2)
            first_max = p_row_max.load(_S_ROW)
            acc = _rescaled(acc, row_max, first_max)
            acc = warpgroup_mma(p, v_0, acc, is_async=True)
            row_max = first_max
        new_max = gl.maximum(row_max, tile_max)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        probs = gl.exp2(s - shift[:, None])
        row_sum = row_sum * gl.exp2(sum_max - shift) + gl.sum(probs, 1)
        sum_max = new_max
        probs = probs.to(gl.bfloat16)
        if keeps:
            of_tile = kept_maxima + (first_tile + pair * 2 + group) * 64
            gl.store(of_tile + gl.arange(0, 64, layout=_S_ROW), new_max)
        if group == 0:
            _publish(probs, new_max, p, p_row_max, p_full.index(0))
            acc = _rescaled(acc, row_max, new_max)
            acc = warpgroup_mma(gl.convert_layout(probs, p_layout), v_0, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(k_free.index(group))
            mbarrier.wait(k_full.index(2), phase)
            mbarrier.wait(p_full.index(1), phase)
            fence_async_shared()
            if keeps:
                _begin_to_keep(kept_probs, p, first_tile + pair * 2 + 1)
            row_max = p_row_max.load(_S_ROW)
            acc = _rescaled(acc, new_max, row_max)
            acc = warpgroup_mma(p, v_1, acc, is_async=True)
        else:
            # p is read until then.
            acc = warpgroup_mma_wait(0, deps=[acc])
            if keeps:
                tma.store_wait(0)
            _release(k_free.index(group))
            _publish(probs, new_max, p, p_row_max, p_full.index(1))
            acc = _rescaled(acc, row_max, new_max)
            row_max = new_max
            acc = warpgroup_mma(gl.convert_layout(probs, p_layout), v_1, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if keeps:
            tma.store_wait(0)
        _release(k_free.index(2 + group))

    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum *= gl.exp2(sum_max - shift)
    sums.index(group).store(row_sum)
    _release(sum_full.index(group))
    mbarrier.wait(sum_full.index(1 - group), 0)
    row_sum += sums.index(1 - group).load(_S_ROW)
    # not > 0: NaN stays NaN
    row_sum = gl.where(row_sum == 0, 1.0, row_sum)
    acc = acc * gl.convert_layout(1.0 / row_sum, _O_ROW)[:, None]
    # The queries are not read any more.
    stage = all_q_v.index(0).slice(group * 256, 256, 1)
    store_heads(acc, stage, out + group * 256, num_heads, 256, 512)
    if group == 0:
        heads = gl.arange(0, 64, layout=_S_ROW)
        ln_2: gl.constexpr = 0.6931471805599453
        gl.store(lse + heads, (row_max + gl.log2(row_sum)) * ln_2, mask=heads < num_heads)


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit(do_not_specialize=["num_tiles"])
def _sparse_mla_fwd_hopper_kernel(
    q,
    kv,
    indices,
    members,
    lengths,
    out,
    lse,
    scale_log2,
    num_rows,
    rows_per_item,
    heads_per_query,
    width,
    kept_probs,
    kept_maxima,
    num_tiles,
    PACKED: gl.constexpr,
    KEEPS: gl.constexpr,
):
    # The last queries have the most keys under a causal mask: they go first, for an even finish.
    item = (gl.num_programs(0) - 1 - gl.program_id(0)).to(gl.int64)
    first_row = gl.program_id(1) * 64
    row = item * rows_per_item + first_row
    num_heads = gl.minimum(rows_per_item - first_row, (num_rows - row).to(gl.int32))
    length = gl.load(lengths + item)
    indices += item * width
    members += item * width

    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 512], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = (
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], wide),  # q_v
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square),  # q_tail
        gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], wide),  # k_v
        gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], square),  # k_tail
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square),  # p
        gl.allocate_shared_memory(gl.float32, [64], flat),  # p_row_max
        gl.allocate_shared_memory(gl.float32, [2, 64], flat),  # sums
    )
    # k_full, k_free, p_full, sum_full
    bars = (_barriers(4, 128), _barriers(4, 1), _barriers(2, 1), _barriers(2, 1))
    fence_async_shared()
    gl.thread_barrier()
    out += row * 512
    lse += row
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    results = (out, lse)
    # Tiles are kept in the order of rows of the selection, parts of their rows, and keys.
    first_tile = (item * gl.num_programs(1) + gl.program_id(1)).to(gl.int32) * num_tiles
    kept = (kept_probs, kept_maxima, first_tile)
    sizes = (length, scale_log2, num_heads, heads_per_query)
    gl.warp_specialize(
        [
            (_attend, (results, kept, members, sizes, smem, bars, PACKED, KEEPS, zero)),
            (_attend, (results, kept, members, sizes, smem, bars, PACKED, KEEPS, one)),
            (_gather, (q + row * 576, kv, indices, length, num_heads, smem, bars)),
        ],
        [4, 4],
        [216, 72],
    )


def sparse_mla_fwd_into(
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    kept: TileProbs | None,
) -> None:
    """As portable_fwd.sparse_mla_fwd_into, for q [t_q, h, 576] bf16 and d_v = 512 on Hopper.

    The queries of one row of the selection have at most 64 heads together, or there is one.
    """
    t_q, h, _ = q.shape
    if out.numel() == 0:
        return
    rows_per_item = h * selection.queries_per_row
    packed = selection.members is not None
    _sparse_mla_fwd_hopper_kernel[(len(selection.lengths), triton.cdiv(rows_per_item, _ROWS))](
        q,
        kv,
        selection.indices,
        selection.members if packed else selection.indices,
        selection.lengths,
        out,
        lse,
        softmax_scale * 1.4426950408889634,
        t_q * h,
        rows_per_item,
        h,
        selection.indices.shape[1],
        q if kept is None else _described(kept.probs),
        lse if kept is None else kept.maxima,
        0 if kept is None else kept.maxima.shape[2],
        PACKED=packed,
        KEEPS=kept is not None,
        num_warps=4,
    )


def tile_shape(q: Tensor, d_v: int) -> TileShape:
    """Of what sparse_mla_fwd_into keeps."""
    del q, d_v
    return TileShape(_ROWS, 64)


def _described(probs: Tensor) -> TensorDescriptor:
    """Of the tiles of probs [.., 64, 64] bf16, one below the other."""
    layout = gl.NVMMASharedLayout.get_default_for([_ROWS, 64], gl.bfloat16)
    return TensorDescriptor.from_tensor(probs.view(-1, 64), [_ROWS, 64], layout)
