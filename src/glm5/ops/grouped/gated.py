"""SwiGLU of the experts' hidden rows, by whichever implementation serves the tensors' device."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.precision import FUSED_DTYPES, accumulation_dtype


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) * up * prob of each row, in fp32 and rounded once (arXiv 2002.05202).

    gate_up [t, 2 i]: gate before up; probs [t], the routers' weights -> [t, i] in the dtype of
    gate_up. Differentiable in both. On a GPU fused for bf16, fp16 and fp32: it keeps its two inputs
    alone for the backward.
    """
    assert probs.shape == gate_up.shape[:1], f"probs {probs.shape}, gate_up {gate_up.shape}"
    if not gate_up.is_cuda or gate_up.dtype not in FUSED_DTYPES:
        return weighted_swiglu_reference(gate_up, probs)
    # Triton is imported only where its kernels run.
    from glm5.ops.grouped.swiglu import weighted_swiglu_fused

    return weighted_swiglu_fused(gate_up, probs)


def weighted_swiglu_reference(gate_up: Tensor, probs: Tensor) -> Tensor:
    """See weighted_swiglu; it keeps no more than the fused one does."""
    return _WeightedSwiglu.apply(gate_up, probs)


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, probs)
        return _gated(gate_up, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = _gated(*leaves)
        grad_gate_up, grad_probs = torch.autograd.grad(out, leaves, grad)
        return grad_gate_up, grad_probs


def _gated(gate_up: Tensor, probs: Tensor) -> Tensor:
    gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, dim=-1)
    return (F.silu(gate) * up * probs.unsqueeze(-1)).to(gate_up.dtype)
