"""Backward of sparse_mla in plain Triton: any size and dtype, one program per token and heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.sparse_mla.portable_tiles import PortableTiles
from glm5.ops.sparse_mla.selection import Selection


@triton.jit
def _sparse_mla_bwd_kernel(
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
    d_qk: tl.constexpr,
    d_v: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UPCAST: tl.constexpr,
    KEEP_ROWS: tl.constexpr,
):
    log2_e: tl.constexpr = 1.4426950408889634
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_v, in_tail = tl.arange(0, BLOCK_V), d_v + tl.arange(0, BLOCK_T)
    rows = token * num_heads + heads
    is_head = heads[:, None] < num_heads
    is_v, is_tail = in_v[None, :] < d_v, in_tail[None, :] < d_qk
    q_v = tl.load(q + rows[:, None] * d_qk + in_v[None, :], mask=is_head & is_v, other=0.0)
    q_tail = tl.load(q + rows[:, None] * d_qk + in_tail[None, :], mask=is_head & is_tail, other=0.0)
    out_places = rows[:, None] * d_v + in_v[None, :]
    d_out = tl.load(grad_out + out_places, mask=is_head & is_v, other=0.0)
    out_tile = tl.load(out + out_places, mask=is_head & is_v, other=0.0)
    row_term = tl.sum(out_tile.to(tl.float32) * d_out.to(tl.float32), 1)
    # +inf makes every probability of a padded head 0.
    lse_log2 = tl.load(lse + rows, mask=heads < num_heads, other=float("inf")) * log2_e
    if UPCAST:
        q_v, q_tail, d_out = q_v.to(tl.float32), q_tail.to(tl.float32), d_out.to(tl.float32)
    dq_v = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    dq_tail = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
    length = tl.load(lengths + token)
    for start in range(0, length, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        keys = tl.load(topk_indices + token * topk + columns, mask=columns < length, other=-1)
        valid = keys >= 0
        places = keys.to(tl.int64)[:, None] * d_qk
        targets = places
        if KEEP_ROWS:
            part = token * tl.num_programs(1) + tl.program_id(1)
            targets = (part * topk + columns)[:, None] * d_qk
        mask_v, mask_tail = valid[:, None] & is_v, valid[:, None] & is_tail
        k_v = tl.load(kv + places + in_v[None, :], mask=mask_v, other=0.0)
        k_tail = tl.load(kv + places + in_tail[None, :], mask=mask_tail, other=0.0)
        if UPCAST:
            k_v, k_tail = k_v.to(tl.float32), k_tail.to(tl.float32)
        logits = tl.dot(q_v, tl.trans(k_v), input_precision="ieee")
        if d_qk > d_v:
            logits += tl.dot(q_tail, tl.trans(k_tail), input_precision="ieee")
        logits = logits * (softmax_scale * log2_e) - lse_log2[:, None]
        probs = tl.where(valid[None, :], tl.exp2(logits), 0.0)
        d_probs = tl.dot(d_out, tl.trans(k_v), input_precision="ieee")
        d_logits = (probs * (d_probs - row_term[:, None]) * softmax_scale).to(k_v.dtype)
        probs = probs.to(k_v.dtype)
        dq_v += tl.dot(d_logits, k_v, input_precision="ieee")
        dk_v = tl.dot(tl.trans(d_logits), q_v, input_precision="ieee")
        dk_v += tl.dot(tl.trans(probs), d_out, input_precision="ieee")
        if KEEP_ROWS:
            dk_v = dk_v.to(grad_kv.dtype.element_ty)
            tl.store(grad_kv + targets + in_v[None, :], dk_v, mask=mask_v)
        else:
            tl.atomic_add(grad_kv + targets + in_v[None, :], dk_v, mask=mask_v, sem="relaxed")
        if d_qk > d_v:
            dq_tail += tl.dot(d_logits, k_tail, input_precision="ieee")
            dk_tail = tl.dot(tl.trans(d_logits), q_tail, input_precision="ieee")
            tail_targets = grad_kv + targets + in_tail[None, :]
            if KEEP_ROWS:
                tl.store(tail_targets, dk_tail.to(grad_kv.dtype.element_ty), mask=mask_tail)
            else:
                tl.atomic_add(tail_targets, dk_tail, mask=mask_tail, sem="relaxed")
    dtype = grad_q.dtype.element_ty
    dq_rows = grad_q + rows[:, None] * d_qk
    tl.store(dq_rows + in_v[None, :], dq_v.to(dtype), mask=is_head & is_v)
    tl.store(dq_rows + in_tail[None, :], dq_tail.to(dtype), mask=is_head & is_tail)


def sparse_mla_bwd(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients in q and kv (FlashAttention, arXiv 2205.14135, appendix B), kv's by fp32 atomics.

    grad_out, out [t_q, h, d_v], q [t_q, h, d_qk], kv [t_k, d_qk] one float dtype,
    selection one_by_one, lse [t_q, h] fp32, all contiguous
    -> grad_q [t_q, h, d_qk], grad_kv [t_k, d_qk], in the inputs' dtype.
    The order of the additions into grad_kv, hence its last bits, change from run to run.
    """
    grad_q = torch.empty_like(q)
    grad_kv = torch.zeros_like(kv, dtype=torch.float32)
    _launch(grad_out, q, kv, selection, out, lse, softmax_scale, grad_q, grad_kv, False)
    return grad_q, grad_kv.to(kv.dtype)


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
    """As sparse_mla_bwd, but each term of grad_kv is written to its own row instead of added up.

    grad_q like q; rows [t_q, num_head_parts, topk, d_qk] any float dtype: row (i, p, c) becomes
    what the p-th part of query i's heads adds to grad_kv[indices[i, c]]; others are not
    written.
    """
    _launch(grad_out, q, kv, selection, out, lse, softmax_scale, grad_q, rows, True)


def num_head_parts(q: Tensor, d_v: int) -> int:
    """Programs for each query of q [t_q, h, d_qk]."""
    return triton.cdiv(q.shape[1], PortableTiles.backward(q, d_v).heads)


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
    t_q, h, d_qk = q.shape
    d_v = out.shape[2]
    if q.numel() == 0:
        return
    tiles = PortableTiles.backward(q, d_v)
    _sparse_mla_bwd_kernel[(t_q, num_head_parts(q, d_v))](
        grad_out,
        q,
        kv,
        selection.indices,
        selection.lengths,
        out,
        lse,
        grad_q,
        grad_kv,
        softmax_scale,
        h,
        selection.indices.shape[1],
        d_qk=d_qk,
        d_v=d_v,
        KEEP_ROWS=keep_rows,
        **tiles.launch_options(),
    )
