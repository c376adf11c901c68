"""SwiGLU of the experts' hidden rows, times the probability of each row's expert."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _weighted_swiglu_kernel(gate_up, probs, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        gate = tl.load(gate_up + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + columns, mask=mask, other=0.0)
        result = gate * tl.sigmoid(gate) * up.to(tl.float32) * prob
        tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_swiglu_bwd_kernel(
    grad, gate_up, probs, grad_gate_up, grad_probs, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        place = row * 2 * width + columns
        gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + place + width, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += dy * silu * up
        dy *= prob
        d_gate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(grad_gate_up + place, d_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
        d_up = dy * silu
        tl.store(grad_gate_up + place + width, d_up.to(grad_gate_up.dtype.element_ty), mask=mask)
    tl.store(grad_probs + row, tl.sum(total, 0))


class _WeightedSwigluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, probs: Tensor) -> Tensor:
        gate_up, probs = gate_up.contiguous(), probs.contiguous()
        t, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(t, width)
        if out.numel():
            _weighted_swiglu_kernel[(t,)](gate_up, probs, out, width, **_options(width))
        ctx.save_for_backward(gate_up, probs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, probs = ctx.saved_tensors
        t, width = gate_up.shape[0], gate_up.shape[1] // 2
        grad_gate_up = torch.empty_like(gate_up)
        grad_probs = torch.empty(t, dtype=torch.float32, device=probs.device)
        if t:
            _weighted_swiglu_bwd_kernel[(t,)](
                grad.contiguous(), gate_up, probs, grad_gate_up, grad_probs, width,
                **_options(width),
            )  # fmt: skip
        return grad_gate_up, grad_probs.to(probs.dtype)


def _options(width: int) -> dict[str, Any]:
    return {
        "BLOCK": min(2048, triton.next_power_of_2(width)),
        "num_warps": 8 if width > 1024 else 4,
    }


def weighted_swiglu_fused(gate_up: Tensor, probs: Tensor) -> Tensor:
    """See weighted_swiglu; in Triton, for a GPU or the interpreter."""
    return _WeightedSwigluFunction.apply(gate_up, probs)
