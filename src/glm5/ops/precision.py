"""The dtypes in which the references compute, and which the fused kernels take."""

import torch
from torch import Tensor

# What the fused kernels compute; fp64, which serves to check gradients, takes the reference.
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 tensors, so that gradients can be checked numerically; else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def no_autocast(x: Tensor) -> torch.autocast:
    """Context that keeps an enclosing torch.autocast from narrowing the matmuls on x's device."""
    return torch.autocast(x.device.type, enabled=False)
