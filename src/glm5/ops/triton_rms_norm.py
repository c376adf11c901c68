"""RMSNorm as one kernel each way: a program holds a whole row in registers."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Of the backward with a gradient of the weight: two for each multiprocessor of an H200, on every
# device, so that the sums have one order.
_WEIGHT_PROGRAMS = 264


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, weight_ptr, out_ptr, scale_ptr, x_stride, width, eps, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    normed = (x * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
    out = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, out, mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _rms_norm_bwd_kernel(
    grad_ptr, x_ptr, weight_ptr, scale_ptr, grad_x_ptr, partial_ptr, num_rows, grad_stride,
    x_stride, width, WANT_X: tl.constexpr, WANT_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(program, num_rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad_ptr + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = x * scale
        if WANT_WEIGHT:
            total += dy * normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        if WANT_X:
            dy *= weight
            dx = scale * (dy - normed * (tl.sum(dy * normed, 0) / width))
            place = grad_x_ptr + row * width + columns
            tl.store(place, dx.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if WANT_WEIGHT:
        tl.store(partial_ptr + program.to(tl.int64) * width + columns, total, mask=mask)


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, weight = _rows(x), weight.contiguous()
        out, scale = rms_norm_fwd(rows, weight, eps)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        grad_x, grad_weight = rms_norm_bwd(
            _rows(grad), rows, weight, scale, want_x=want_x, want_weight=want_weight
        )
        return None if grad_x is None else grad_x.view(grad.shape), grad_weight, None


def rms_norm_fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [t, d] with adjacent columns, weight [d] -> (out [t, d], 1 / rms [t] fp32)."""
    t, width = x.shape
    out = x.new_empty(t, width, dtype=torch.promote_types(x.dtype, weight.dtype))
    scale = x.new_empty(t, dtype=torch.float32)
    if out.numel():
        _rms_norm_fwd_kernel[(t,)](
            x, weight, out, scale, x.stride(0), width, eps, **launch_options(width)
        )
    return out, scale


def rms_norm_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *, want_x: bool, want_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(grad of x [t, d], grad of weight [d]), either only if wanted.

    grad, x [t, d] with adjacent columns; weight [d]; scale [t] fp32. The gradient of the weight is
    the sum of what each program summed in fp32, the same bits every time.
    """
    t, width = x.shape
    num_programs = min(t, _WEIGHT_PROGRAMS) if want_weight else t
    grad_x = x.new_empty(t, width) if want_x else None
    partial = x.new_empty(num_programs, width, dtype=torch.float32) if want_weight else None
    if x.numel():
        _rms_norm_bwd_kernel[(num_programs,)](
            grad, x, weight, scale, grad_x, partial, t, grad.stride(0), x.stride(0), width,
            WANT_X=want_x, WANT_WEIGHT=want_weight, **launch_options(width),
        )  # fmt: skip
    return grad_x, None if partial is None else partial.sum(0).to(weight.dtype)


def launch_options(width: int) -> dict[str, Any]:
    """A power of two that holds a row, and 16 elements of it in each thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _rows(x: Tensor) -> Tensor:
    """x [..., d] -> [t, d] with adjacent columns; copied only where there is no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See rms_norm; in Triton, for a GPU or the interpreter."""
    return _RmsNormFunction.apply(x, weight, eps)
