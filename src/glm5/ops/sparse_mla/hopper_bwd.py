"""Backward of sparse_mla for Hopper in Gluon: bf16, d_qk 576, d_v 512, one token per program.

Shared memory holds the queries, their output gradients and one tile of 64 keys; the next tile is
gathered while the gradients of the keys are computed and added to memory, which reads no keys.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from glm5.ops.sparse_mla.hopper_gather import copy_rows, key_rows

_HEADS = 64


@gluon.jit
def _issue_grad_keys(p, d_s, grad_out, q, start: gl.constexpr, layout: gl.constexpr):
    """Begin p^T grad_out + d_s^T q for the 128 columns from start on."""
    acc = gl.zeros([64, 128], gl.float32, layout)
    acc = warpgroup_mma(
        p.permute((1, 0)), grad_out.slice(start, 128, 1), acc, use_acc=False, is_async=True
    )
    return warpgroup_mma(d_s.permute((1, 0)), q.slice(start, 128, 1), acc, is_async=True)


@gluon.jit
def _add_grad_keys(grad_rows, acc, start: gl.constexpr, layout: gl.constexpr):
    columns = start + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    gl.atomic_add(grad_rows[:, None] + columns[None, :], acc, sem="relaxed")


@gluon.jit
def _sparse_mla_bwd_hopper_kernel(
    grad_out,
    q,
    kv,
    topk_indices,
    lengths,
    out,
    lse,
    grad_q,
    grad_kv,
    softmax_scale,
    num_heads,
    topk,
):
    log2_e: gl.constexpr = 1.4426950408889634
    # The last tokens have the most keys under a causal mask: they go first, for an even finish.
    token = (gl.num_programs(0) - 1 - gl.program_id(0)).to(gl.int64)
    first_head = gl.program_id(1) * 64
    row = token * num_heads + first_head
    num_heads -= first_head
    length = gl.load(lengths + token)
    indices = topk_indices + token * topk

    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 512], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    q_v = gl.allocate_shared_memory(gl.bfloat16, [64, 512], wide)
    q_tail = gl.allocate_shared_memory(gl.bfloat16, [64, 64], square)
    k_v = gl.allocate_shared_memory(gl.bfloat16, [64, 512], wide)
    k_tail = gl.allocate_shared_memory(gl.bfloat16, [64, 64], square)
    d_out = gl.allocate_shared_memory(gl.bfloat16, [64, 512], wide)
    p = gl.allocate_shared_memory(gl.bfloat16, [64, 64], square)
    d_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], square)

    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)

    copy_rows(key_rows(kv, indices, 0, length, 8), k_v, k_tail, 8)
    async_copy.commit_group()

    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, rows_layout))
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, rows_layout))[None, :]
    tail_columns = gl.arange(0, 64, layout=gl.SliceLayout(0, rows_layout))[None, :] + 512
    is_head = (heads < num_heads)[:, None]
    q_places = (row + heads)[:, None] * 576
    out_places = (row + heads)[:, None] * 512 + columns
    q_v.store(gl.load(q + q_places + columns, mask=is_head, other=0.0))
    q_tail.store(gl.load(q + q_places + tail_columns, mask=is_head, other=0.0))
    d_out_rows = gl.load(grad_out + out_places, mask=is_head, other=0.0)
    d_out.store(d_out_rows)
    out_rows = gl.load(out + out_places, mask=is_head, other=0.0)
    row_term = gl.sum(out_rows.to(gl.float32) * d_out_rows.to(gl.float32), 1)
    row_term = gl.convert_layout(row_term, s_row)
    s_heads = gl.arange(0, 64, layout=s_row)
    # +inf makes every probability of a padded head 0.
    lse_log2 = gl.load(lse + row + s_heads, mask=s_heads < num_heads, other=float("inf")) * log2_e

    dq_v = gl.zeros([64, 512], gl.float32, dq_layout)
    dq_tail = gl.zeros([64, 64], gl.float32, s_layout)
    s_columns = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    dk_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, dk_layout))
    for start in range(0, length, 64):
        s_keys = gl.load(indices + start + s_columns, mask=start + s_columns < length, other=-1)
        dk_keys = gl.load(indices + start + dk_rows, mask=start + dk_rows < length, other=0)
        next_rows = key_rows(kv, indices, start + 64, length, 8)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()

        s = gl.zeros([64, 64], gl.float32, s_layout)
        s = warpgroup_mma(q_v, k_v.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
        d_p = gl.zeros([64, 64], gl.float32, s_layout)
        d_p = warpgroup_mma(d_out, k_v.permute((1, 0)), d_p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        probs = gl.exp2(s * (softmax_scale * log2_e) - lse_log2[:, None])
        probs = gl.where((s_keys >= 0)[None, :], probs, 0.0)
        p.store(probs.to(gl.bfloat16))
        d_p = warpgroup_mma_wait(0, deps=[d_p])
        d_s.store((probs * (d_p - row_term[:, None]) * softmax_scale).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()

        dq_v = warpgroup_mma(d_s, k_v, dq_v, is_async=True)
        dq_tail = warpgroup_mma(d_s, k_tail, dq_tail, is_async=True)
        acc = _issue_grad_keys(p, d_s, d_out, q_v, 0, dk_layout)
        dq_v, dq_tail = warpgroup_mma_wait(2, deps=[dq_v, dq_tail])
        # All warps are done with this tile's keys.
        gl.thread_barrier()
        if start + 64 < length:
            copy_rows(next_rows, k_v, k_tail, 8)
        async_copy.commit_group()

        grad_rows = grad_kv + gl.maximum(dk_keys, 0).to(gl.int64) * 576
        for chunk in gl.static_range(4):
            acc = warpgroup_mma_wait(0, deps=[acc])
            _add_grad_keys(grad_rows, acc, chunk * 128, dk_layout)
            if chunk < 3:
                acc = _issue_grad_keys(p, d_s, d_out, q_v, chunk * 128 + 128, dk_layout)
        tail = gl.zeros([64, 64], gl.float32, s_layout)
        tail = warpgroup_mma(d_s.permute((1, 0)), q_tail, tail, use_acc=False, is_async=True)
        tail = warpgroup_mma_wait(0, deps=[tail])
        _add_grad_keys(gl.convert_layout(grad_rows, s_row), tail, 512, s_layout)

    async_copy.wait_group(0)
    gl.thread_barrier()
    # Through shared memory, so that whole rows are written.
    q_v.store(dq_v.to(gl.bfloat16))
    q_tail.store(dq_tail.to(gl.bfloat16))
    gl.thread_barrier()
    gl.store(grad_q + q_places + columns, q_v.load(rows_layout), mask=is_head)
    gl.store(grad_q + q_places + tail_columns, q_tail.load(rows_layout), mask=is_head)


def sparse_mla_bwd(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """As portable_bwd.sparse_mla_bwd, for q [t_q, h, 576] bf16 and d_v = 512 on Hopper."""
    t_q, h, _ = q.shape
    grad_q = torch.empty_like(q)
    grad_kv = torch.zeros_like(kv, dtype=torch.float32)
    if q.numel() == 0:
        return grad_q, grad_kv
    _sparse_mla_bwd_hopper_kernel[(t_q, triton.cdiv(h, _HEADS))](
        grad_out,
        q,
        kv,
        topk_indices,
        lengths,
        out,
        lse,
        grad_q,
        grad_kv,
        softmax_scale,
        h,
        topk_indices.shape[1],
        num_warps=8,
    )
    return grad_q, grad_kv
