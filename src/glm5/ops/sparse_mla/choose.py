"""Which fused kernels compute a given attention."""

import torch
from torch import Tensor

from glm5.ops.devices import is_hopper
from glm5.ops.sparse_mla.kernels import Kernels
from glm5.ops.sparse_mla.portable import PortableKernels


def choose_kernels(q: Tensor, d_v: int) -> Kernels:
    """Gluon on Hopper for the sizes of GLM-5 in bf16, plain Triton for everything else."""
    if not is_hopper(q) or (q.dtype, q.shape[2], d_v) != (torch.bfloat16, 576, 512):
        return PortableKernels()
    # Gluon is experimental: it is imported only where its kernels run.
    from glm5.ops.sparse_mla.hopper import HopperKernels

    return HopperKernels()
