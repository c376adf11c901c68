"""Forward of sparse_mla for Hopper in Gluon: bf16, d_qk 576, d_v 512, one token per program.

Four warps gather keys with cp.async into two buffers; eight warps multiply. Both groups of four
among the eight see all 64 heads: they split the keys of a tile for the logits and the columns of
the values for the output, so the probabilities pass through shared memory.
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

from glm5.ops.sparse_mla.hopper_gather import copy_rows, key_rows

_HEADS = 64


@gluon.jit
def _gather_keys(kv, indices, length, k_v, k_tail, is_full, is_free):
    """Producer: fill the two buffers in turn."""
    for tile in range(0, gl.cdiv(length, 64)):
        buffer = tile & 1
        rows, is_key = key_rows(kv, indices, tile * 64, length, 4)
        # The first round finds both buffers free.
        mbarrier.wait(is_free.index(buffer), ((tile >> 1) & 1) ^ 1)
        copy_rows(rows, is_key, k_v.index(buffer), k_tail.index(buffer), 4)
        async_copy.mbarrier_arrive(is_full.index(buffer), increment_count=False)


@gluon.jit
def _attend(
    q,
    indices,
    out,
    lse,
    length,
    scale_log2,
    num_heads,
    q_v,
    q_tail,
    k_v,
    k_tail,
    p,
    is_full,
    is_free,
):
    """Consumer: logits, online softmax, output."""
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)

    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, rows_layout))
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, rows_layout))
    tail_columns = gl.arange(0, 64, layout=gl.SliceLayout(0, rows_layout))
    is_head = (heads < num_heads)[:, None]
    q_v.store(gl.load(q + heads[:, None] * 576 + columns[None, :], mask=is_head, other=0.0))
    q_tail.store(
        gl.load(q + heads[:, None] * 576 + 512 + tail_columns[None, :], mask=is_head, other=0.0)
    )
    fence_async_shared()

    row_max = gl.full([64], float("-inf"), gl.float32, s_row)
    # Summed over the keys once, at the end: a sum over two groups of warps costs a barrier.
    p_sum = gl.zeros([64, 64], gl.float32, s_layout)
    acc = gl.zeros([64, 512], gl.float32, o_layout)
    key_columns = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    for tile in range(0, gl.cdiv(length, 64)):
        buffer = tile & 1
        v_tile = k_v.index(buffer)
        # Read early, used after the logits.
        places = tile * 64 + key_columns
        keys = gl.load(indices + places, mask=places < length, other=-1)
        mbarrier.wait(is_full.index(buffer), (tile >> 1) & 1)
        fence_async_shared()
        s = gl.zeros([64, 64], gl.float32, s_layout)
        s = warpgroup_mma(q_v, v_tile.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.index(buffer).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where((keys >= 0)[None, :], s * scale_log2, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 1))
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        probs = gl.exp2(s - shift[:, None])
        rescale = gl.exp2(row_max - shift)
        row_max = new_max
        p.store(probs.to(gl.bfloat16))
        p_sum = p_sum * rescale[:, None] + probs
        acc = acc * gl.convert_layout(rescale, o_row)[:, None]
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(p, v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(is_free.index(buffer), count=1)

    row_sum = gl.sum(p_sum, 1)
    row_sum = gl.where(row_sum > 0, row_sum, 1.0)
    s_heads = gl.arange(0, 64, layout=s_row)
    gl.store(
        lse + s_heads,
        (row_max + gl.log2(row_sum)) * 0.6931471805599453,
        mask=s_heads < num_heads,
    )
    acc = acc * gl.convert_layout(1.0 / row_sum, o_row)[:, None]
    # Through shared memory, so that whole rows are written.
    q_v.store(acc.to(gl.bfloat16))
    gl.thread_barrier()
    gl.store(out + heads[:, None] * 512 + columns[None, :], q_v.load(rows_layout), mask=is_head)


@gluon.jit
def _sparse_mla_fwd_hopper_kernel(
    q, kv, topk_indices, lengths, out, lse, scale_log2, num_heads, topk
):
    # The last tokens have the most keys under a causal mask: they go first, for an even finish.
    token = (gl.num_programs(0) - 1 - gl.program_id(0)).to(gl.int64)
    first_head = gl.program_id(1) * 64
    row = token * num_heads + first_head
    length = gl.load(lengths + token)
    indices = topk_indices + token * topk

    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 512], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    q_v = gl.allocate_shared_memory(gl.bfloat16, [64, 512], wide)
    q_tail = gl.allocate_shared_memory(gl.bfloat16, [64, 64], square)
    k_v = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], wide)
    k_tail = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], square)
    p = gl.allocate_shared_memory(gl.bfloat16, [64, 64], square)
    is_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(is_full.index(i), count=128)
        mbarrier.init(is_free.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q + row * 576,
                    indices,
                    out + row * 512,
                    lse + row,
                    length,
                    scale_log2,
                    num_heads - first_head,
                    q_v,
                    q_tail,
                    k_v,
                    k_tail,
                    p,
                    is_full,
                    is_free,
                ),
            ),
            (_gather_keys, (kv, indices, length, k_v, k_tail, is_full, is_free)),
        ],
        [4],
        [72],
    )


def sparse_mla_fwd(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    """As portable_fwd.sparse_mla_fwd, for q [t_q, h, 576] bf16 and d_v = 512 on Hopper."""
    t_q, h, _ = q.shape
    out = q.new_empty(t_q, h, d_v)
    lse = torch.empty(t_q, h, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    _sparse_mla_fwd_hopper_kernel[(t_q, triton.cdiv(h, _HEADS))](
        q,
        kv,
        topk_indices,
        lengths,
        out,
        lse,
        softmax_scale * 1.4426950408889634,
        h,
        topk_indices.shape[1],
        num_warps=8,
    )
    return out, lse
