"""RMSNorm of rows, by whichever implementation serves the tensors' device."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.precision import FUSED_DTYPES
from glm5.ops.row_major import row_major


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * cast(x / sqrt(mean(x^2) + eps)), the mean in fp32 (arXiv 1910.07467).

    x [..., d] any float dtype and any strides; weight [d] -> y [..., d] row-major, in the dtype to
    which x and weight promote; the cast is to the dtype of x, and the product is rounded once more.
    Differentiable in both. On a GPU fused for bf16, fp16 and fp32. A row's result and its gradient
    depend on that row alone; it keeps no more for the backward than its inputs and [...] fp32.
    """
    assert weight.shape == x.shape[-1:], f"weight {weight.shape}, x {x.shape}"
    if not x.is_cuda or x.dtype not in FUSED_DTYPES or weight.dtype not in FUSED_DTYPES:
        return rms_norm_reference(x, weight, eps)
    # Triton is imported only where its kernels run.
    from glm5.ops.triton_rms_norm import rms_norm_fused

    return rms_norm_fused(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See rms_norm; it keeps no more than the fused one does."""
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return row_major(_normed(x, weight, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:2]
        pairs = zip(ctx.saved_tensors, wanted, strict=True)
        leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in pairs]
        with torch.enable_grad():
            out = _normed(leaves[0], leaves[1], ctx.eps)
        found = iter(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad))
        return *(next(found) if is_wanted else None for is_wanted in wanted), None


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
