"""The Gluon forward for Hopper with the backward of NVIDIA's cuDNN frontend, as one pair.

NVIDIA's kernel is compiled when it first runs in a process, once for each number of heads and
each topk, which takes seconds; lengths are free.
"""

import torch
from cudnn.deepseek_sparse_attention import SparseAttentionBackward
from torch import Tensor

from glm5.ops.sparse_mla.hopper import HopperKernels
from glm5.ops.sparse_mla.portable import PortableKernels
from glm5.ops.sparse_mla.selection import Selection

# NVIDIA's kernels read 16 bytes at a time from the start of a tensor.
_ALIGNMENT = 16


def cudnn_bwd(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """As portable_bwd.sparse_mla_bwd: q [t_q, h, 576] bf16 with h >= 2, d_v = 512, one query a row.

    Temporary memory: 4 bytes for each element of kv, 8 for each query's head.
    """
    assert selection.members is None, "each tile of cuDNN's kernel holds the heads of one query"
    if q.numel() == 0 or kv.numel() == 0 or selection.indices.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(kv)
    inputs = [_aligned(x) for x in (q, kv, out, grad_out, lse)]
    # A sink is one more logit of each head; exp(-inf) adds nothing.
    no_sink = torch.full((q.shape[1],), -torch.inf, device=q.device)
    inputs += no_sink, _aligned(selection.indices)
    # Holds no tensor. One for each call, because the frontend keeps those that it makes itself, for
    # every shape that it has ever seen.
    plan = SparseAttentionBackward(
        *inputs, sample_topk_length=selection.lengths, softmax_scale=softmax_scale
    )
    plan.check_support()
    plan.compile()
    workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=q.device)
    grad_q, grad_kv = torch.empty_like(q), torch.empty_like(kv)
    plan.execute(
        *inputs,
        grad_q,
        grad_kv,
        topk_length=selection.lengths,
        workspace=workspace,
        d_sink=torch.empty_like(no_sink),
    )
    return grad_q, grad_kv


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where it is a slice that starts between two units of memory."""
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


class CudnnKernels(HopperKernels):
    """bf16, d_qk 576, d_v 512, 2 heads and more, one query a tile; not the same bits every time."""

    select = staticmethod(PortableKernels.select)
    backward = staticmethod(cudnn_bwd)
