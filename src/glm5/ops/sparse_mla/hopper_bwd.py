"""Backward of sparse_mla for Hopper in Gluon: bf16, d_qk 576, d_v 512, 64 rows per program.

Rows are heads of one query, or the few heads of several queries over the union of their keys.

Shared memory holds the queries, the gradients of their outputs and one tile of 64 keys. Four
warps gather keys, four compute the probabilities, and four the gradients of the keys, which they
add to memory while the others are already at the next tile. The accumulators of the queries'
gradient are spread over all twelve, because none has registers for more than its part.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from glm5.ops.sparse_mla.hopper_gather import copy_columns, copy_heads, key_rows
from glm5.ops.sparse_mla.hopper_grad_keys import (
    LINE_ROWS,
    ROW_ROWS,
    add_grad_keys,
    put_in_order,
    store_grad_keys,
)
from glm5.ops.sparse_mla.hopper_store import store_heads
from glm5.ops.sparse_mla.selection import Selection

_ROWS = 64


@gluon.jit
def _views(smem, tile):
    """The arrays in shared memory, at slot 0, which only this function knows.

    Were their addresses constant, the compiler would keep dozens of matrix descriptors in
    registers across the loop, and spill them.
    """
    slot = tile >> 30
    a, b, c, d, e, f, g = smem
    return (
        a.index(slot),
        b.index(slot),
        c.index(slot),
        d.index(slot),
        e.index(slot),
        f.index(slot),
        g.index(slot),
    )


@gluon.jit
def _gather(q, grad_out, kv, indices, grad_q, length, num_heads, smem, bars):
    """Copy the token's rows once, then the tiles of keys; the rest of grad_q = d_s k."""
    q_v, q_tail, k_v, k_tail, d_out, _p, d_s = _views(smem, 0)
    k_full, k_free, p_full, _p_free = bars
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    copy_heads(q, num_heads, q_v, 512, 576)
    copy_heads(q + 512, num_heads, q_tail, 64, 576)
    copy_heads(grad_out, num_heads, d_out, 512, 512)
    rows, is_key = key_rows(kv, indices, 0, length)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    dq = gl.zeros([64, 128], gl.float32, dq_layout)
    dq_tail = gl.zeros([64, 64], gl.float32, square)
    for tile in range(0, gl.cdiv(length, 64)):
        copy_columns(rows, is_key, k_v, 0, 512)
        copy_columns(rows, is_key, k_tail, 512, 64)
        # Fires when all copies so far have landed: the first time, the token's rows too.
        async_copy.mbarrier_arrive(k_full, increment_count=False)
        rows, is_key = key_rows(kv, indices, tile * 64 + 64, length)
        mbarrier.wait(k_full, tile & 1)
        mbarrier.wait(p_full, tile & 1)
        fence_async_shared()
        dq = warpgroup_mma(d_s, k_v.slice(0, 128, 1), dq, is_async=True)
        dq_tail = warpgroup_mma(d_s, k_tail, dq_tail, is_async=True)
        dq, dq_tail = warpgroup_mma_wait(0, deps=[dq, dq_tail])
        gl.thread_barrier()
        mbarrier.wait(k_free, tile & 1)
    store_heads(dq, k_v.slice(0, 128, 1), grad_q, num_heads, 128, 576)
    store_heads(dq_tail, k_tail, grad_q + 512, num_heads, 64, 576)


@gluon.jit
def _row_terms(out, grad_out, num_heads, layout: gl.constexpr):
    """sum_d out grad_out of each head."""
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, tile))
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, tile))
    places = heads[:, None] * 512 + columns[None, :]
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, tile))
    for start in gl.static_range(0, 512, 128):
        o = gl.load(out + places + start, mask=(heads < num_heads)[:, None], other=0.0)
        d_o = gl.load(grad_out + places + start, mask=(heads < num_heads)[:, None], other=0.0)
        total += gl.sum(o.to(gl.float32) * d_o.to(gl.float32), 1)
    return gl.convert_layout(total, layout)


@gluon.jit
def _probabilities(
    grad_out,
    out,
    lse,
    members,
    grad_q,
    softmax_scale,
    length,
    num_heads,
    heads_per_query,
    smem,
    bars,
    packed: gl.constexpr,
):
    """p = exp(q k - lse), d_s = p (grad_out v - row_term), and grad_q[:, 128:256] = d_s k."""
    log2_e: gl.constexpr = 1.4426950408889634
    k_full, k_free, p_full, p_free = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    heads = gl.arange(0, 64, layout=s_row)
    # +inf makes every probability of a head that does not exist 0.
    lse_log2 = gl.load(lse + heads, mask=heads < num_heads, other=float("inf")) * log2_e
    query = heads // heads_per_query
    places = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    row_terms = _row_terms(out, grad_out, num_heads, s_row)
    dq = gl.zeros([64, 128], gl.float32, dq_layout)
    for tile in range(0, gl.cdiv(length, 64)):
        q_v, q_tail, k_v, k_tail, d_out, p, d_s = _views(smem, tile)
        if packed:
            is_place = places < length - tile * 64
            bits = gl.load(members + tile * 64 + places, mask=is_place, other=0)
        mbarrier.wait(k_full, tile & 1)
        fence_async_shared()
        s = gl.zeros([64, 64], gl.float32, s_layout)
        s = warpgroup_mma(q_v, k_v.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
        d_p = gl.zeros([64, 64], gl.float32, s_layout)
        d_p = warpgroup_mma(d_out, k_v.permute((1, 0)), d_p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        # A probability is at most 1, and where there is no key only has to be finite: there k is
        # 0, and the gradient of k goes to a row that nobody reads.
        probs = gl.exp2(gl.minimum(s * (softmax_scale * log2_e) - lse_log2[:, None], 1.0))
        if packed:
            probs = gl.where(((bits[None, :] >> query[:, None]) & 1) != 0, probs, 0.0)
        d_p = warpgroup_mma_wait(0, deps=[d_p])
        mbarrier.wait(p_free, (tile & 1) ^ 1)
        p.store(probs.to(gl.bfloat16))
        d_s.store((probs * (d_p - row_terms[:, None]) * softmax_scale).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(p_full, count=1)
        dq = warpgroup_mma(d_s, k_v.slice(128, 128, 1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        gl.thread_barrier()
        mbarrier.arrive(k_free, count=1)
    store_heads(dq, smem[2].index(0).slice(128, 128, 1), grad_q + 128, num_heads, 128, 576)


@gluon.jit
def _grad_keys(
    indices, grad_q, grad_kv, num_keys, length, num_heads, smem, bars, keep_rows: gl.constexpr
):
    """grad_kv += p^T grad_out + d_s^T q, and grad_q[:, 256:] = d_s k."""
    k_full, k_free, p_full, p_free = bars
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    row_layout: gl.constexpr = ROW_ROWS if keep_rows else LINE_ROWS
    rows = gl.arange(0, 64, layout=row_layout)
    dq = gl.zeros([64, 256], gl.float32, dq_layout)
    for tile in range(0, gl.cdiv(length, 64)):
        q_v, q_tail, k_v, _k_tail, d_out, p, d_s = _views(smem, tile)
        places = tile * 64 + rows
        is_row = places < length
        if keep_rows:
            grad_rows = grad_kv + places.to(gl.int64) * 576
        else:
            keys = gl.load(indices + places, mask=is_row, other=-1)
            keys = gl.where(keys >= 0, keys, num_keys)
            grad_rows = grad_kv + keys.to(gl.int64) * 576
        d_out_chunks = d_out._reinterpret(gl.bfloat16, [8, 64, 64], tile_layout)
        q_chunks = q_v._reinterpret(gl.bfloat16, [8, 64, 64], tile_layout)
        mbarrier.wait(k_full, tile & 1)
        mbarrier.wait(p_full, tile & 1)
        fence_async_shared()
        dq = warpgroup_mma(d_s, k_v.slice(256, 256, 1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        gl.thread_barrier()
        mbarrier.arrive(k_free, count=1)
        # Not unrolled: the compiler would compute all matrix descriptors first, and spill them.
        for chunk in range(8):
            acc = gl.zeros([64, 64], gl.float32, square)
            d_out_chunk, q_chunk = d_out_chunks.index(chunk), q_chunks.index(chunk)
            acc = warpgroup_mma(p.permute((1, 0)), d_out_chunk, acc, use_acc=False, is_async=True)
            acc = warpgroup_mma(d_s.permute((1, 0)), q_chunk, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if keep_rows:
                store_grad_keys(grad_rows + chunk * 64, is_row, acc)
            else:
                add_grad_keys(grad_rows + chunk * 64, acc)
        acc = gl.zeros([64, 64], gl.float32, square)
        acc = warpgroup_mma(d_s.permute((1, 0)), q_tail, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(p_free, count=1)
        if keep_rows:
            store_grad_keys(grad_rows + 512, is_row, acc)
        else:
            add_grad_keys(grad_rows + 512, acc)
    store_heads(dq, smem[2].index(0).slice(256, 256, 1), grad_q + 256, num_heads, 256, 576)


@gluon.jit
def _sparse_mla_bwd_hopper_kernel(
    grad_out,
    q,
    kv,
    indices,
    members,
    lengths,
    out,
    lse,
    grad_q,
    grad_kv,
    softmax_scale,
    num_keys,
    num_rows,
    rows_per_item,
    heads_per_query,
    width,
    PACKED: gl.constexpr,
    KEEP_ROWS: gl.constexpr,
):
    # The last queries have the most keys under a causal mask: they go first, for an even finish.
    item = (gl.num_programs(0) - 1 - gl.program_id(0)).to(gl.int64)
    first_row = gl.program_id(1) * 64
    row = item * rows_per_item + first_row
    num_heads = gl.minimum(rows_per_item - first_row, (num_rows - row).to(gl.int32))
    length = gl.load(lengths + item)
    indices += item * width
    members += item * width
    q += row * 576
    grad_q += row * 576
    grad_out += row * 512
    out += row * 512
    if KEEP_ROWS:
        grad_kv += (item * gl.num_programs(1) + gl.program_id(1)) * width * 576

    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 512], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    smem = (
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], wide),  # q_v
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square),  # q_tail
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], wide),  # k_v
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square),  # k_tail
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], wide),  # d_out
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square),  # p
        gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square),  # d_s
    )
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=128)
    mbarrier.init(k_free, count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_free, count=1)
    fence_async_shared()
    gl.thread_barrier()
    bars = (k_full, k_free, p_full, p_free)
    gl.warp_specialize(
        [
            (
                _probabilities,
                (
                    grad_out,
                    out,
                    lse + row,
                    members,
                    grad_q,
                    softmax_scale,
                    length,
                    num_heads,
                    heads_per_query,
                    smem,
                    bars,
                    PACKED,
                ),
            ),
            (
                _grad_keys,
                (indices, grad_q, grad_kv, num_keys, length, num_heads, smem, bars, KEEP_ROWS),
            ),
            (_gather, (q, grad_out, kv, indices, grad_q, length, num_heads, smem, bars)),
        ],
        [4, 4],
        [208, 128],
    )


def sparse_mla_bwd(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """As portable_bwd.sparse_mla_bwd, for q [t_q, h, 576] bf16 and d_v = 512 on Hopper."""
    grad_q, grad_kv = torch.empty_like(q), torch.empty_like(kv)
    # One row more than there are keys, for the places without a key.
    sums = torch.zeros(len(kv) + 1, kv.shape[1], dtype=torch.float32, device=kv.device)
    _launch(grad_out, q, kv, selection, out, lse, softmax_scale, grad_q, sums, False)
    put_in_order(sums[:-1], grad_kv)
    return grad_q, grad_kv


def sparse_mla_bwd_rows(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    grad_q: Tensor,
    rows: Tensor,
) -> None:
    """As portable_bwd.sparse_mla_bwd_rows, with columns in the order of store_grad_keys.

    rows [rows of the selection, num_head_parts, width, 576] bf16.
    """
    _launch(grad_out, q, kv, selection, out, lse, softmax_scale, grad_q, rows, True)


def num_head_parts(q: Tensor, d_v: int) -> int:
    """Programs for each row of the selection, of q [t_q, h, 576]."""
    return triton.cdiv(q.shape[1], _ROWS)


def _launch(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    grad_q: Tensor,
    grad_kv: Tensor,
    keep_rows: bool,
) -> None:
    if q.numel() == 0:
        return
    h, packed = q.shape[1], selection.members is not None
    grid = len(selection.lengths), num_head_parts(q, out.shape[2])
    _sparse_mla_bwd_hopper_kernel[grid](
        grad_out,
        q,
        kv,
        selection.indices,
        selection.members if packed else selection.indices,
        selection.lengths,
        out,
        lse,
        grad_q,
        grad_kv,
        softmax_scale,
        len(kv),
        len(q) * h,
        h * selection.queries_per_row,
        h,
        selection.indices.shape[1],
        PACKED=packed,
        KEEP_ROWS=keep_rows,
        num_warps=4,
    )
