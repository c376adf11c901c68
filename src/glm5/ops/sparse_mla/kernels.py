"""Which fused kernels compute a given attention."""

from typing import Protocol

import torch
from torch import Tensor

from glm5.ops.sparse_mla import portable_bwd, portable_fwd


class Kernels(Protocol):
    """Forward and backward launchers; portable_fwd and portable_bwd say what they take."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        lengths: Tensor,
        softmax_scale: float,
        d_v: int,
    ) -> tuple[Tensor, Tensor]:
        """-> out, lse."""

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        lengths: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """-> grad_q, grad_kv."""


class PortableKernels:
    """Plain Triton: any size."""

    forward = staticmethod(portable_fwd.sparse_mla_fwd)
    backward = staticmethod(portable_bwd.sparse_mla_bwd)


def choose_kernels(q: Tensor, d_v: int) -> Kernels:
    """Gluon on Hopper for the sizes of GLM-5 in bf16, plain Triton for everything else."""
    if not _is_hopper(q) or (q.dtype, q.shape[2], d_v) != (torch.bfloat16, 576, 512):
        return PortableKernels()
    # Gluon is experimental: it is imported only where its kernels run.
    from glm5.ops.sparse_mla.hopper import HopperKernels

    return HopperKernels()


def _is_hopper(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)
