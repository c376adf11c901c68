"""The product with one block-scaled weight: what every kernel must equal."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.block_scaled.quantise import quantise_rows
from glm5.ops.block_scaled.weight import BlockScaled


def frozen_linear_reference(x: Tensor, weight: BlockScaled, *, fp8_compute: bool) -> Tensor:
    """x [t, in] times weight [out, in] -> [t, out]; keeps the float8 weight alone.

    See frozen_linear.
    """
    return _FrozenLinear.apply(x, weight.values, weight.scales, weight.block, fp8_compute)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scales: Tensor, block: tuple[int, int], fp8: bool
    ) -> Tensor:
        ctx.save_for_backward(values, scales)
        ctx.block, ctx.fp8 = block, fp8
        product = _quantised_product if fp8 else _exact_product
        return product(x, BlockScaled(values, scales, block), is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        values, scales = ctx.saved_tensors
        weight = BlockScaled(values, scales, ctx.block)
        product = _quantised_product if ctx.fp8 else _exact_product
        return product(grad, weight, is_forward=False), None, None, None, None


def _exact_product(x: Tensor, weight: BlockScaled, *, is_forward: bool) -> Tensor:
    w = weight.dequantise(x.dtype)
    return F.linear(x, w) if is_forward else x @ w


def _quantised_product(x: Tensor, weight: BlockScaled, *, is_forward: bool) -> Tensor:
    """The pieces of x are as long as the blocks of the dimension that is summed over."""
    piece = weight.block[1 if is_forward else 0]
    values, scales = quantise_rows(x, piece)
    seen = values.float() * scales.repeat_interleave(piece, dim=1)[:, : x.shape[1]]
    w = weight.dequantise(torch.float32)
    return (F.linear(seen, w) if is_forward else seen @ w).to(x.dtype)
