"""Products of every head with its own rows of a block-scaled weight, a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.block_scaled import BlockScaled

# fp32 values and their scales live beside the result while a weight is dequantised.
_FP32_COPIES_BYTES = 8


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Of a weight [h * size, r]: rows first .. first + count of the `size` rows of each head."""

    size: int
    first: int
    count: int


def to_latent(x: Tensor, weight: BlockScaled, rows: HeadRows, *, transient_bytes: int) -> Tensor:
    """y[t, h] = W_h^T x[t, h] for the rows W_h [count, r] of head h.

    x [t, h, count] floating; weight [h * size, r] -> y [t, h, r], in the dtype of x, to which W is
    rounded. Differentiable in x alone. Of W no more is dequantised at a time than fits into
    transient_bytes with the fp32 copies that this takes, or one head; the backward does it again.
    """
    return _HeadProduct.apply(
        x, weight.values, weight.scales, weight.block, rows, True, transient_bytes
    )


def from_latent(x: Tensor, weight: BlockScaled, rows: HeadRows, *, transient_bytes: int) -> Tensor:
    """y[t, h] = W_h x[t, h]: x [t, h, r] -> y [t, h, count]; else as `to_latent`."""
    return _HeadProduct.apply(
        x, weight.values, weight.scales, weight.block, rows, False, transient_bytes
    )


class _HeadProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        rows: HeadRows,
        is_transposed: bool,
        transient_bytes: int,
    ) -> Tensor:
        ctx.save_for_backward(values, scales)
        ctx.settings = block, rows, is_transposed, transient_bytes
        weight = BlockScaled(values, scales, block)
        return _product(x, weight, rows, is_transposed, transient_bytes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        block, rows, is_transposed, transient_bytes = ctx.settings
        values, scales = ctx.saved_tensors
        weight = BlockScaled(values, scales, block)
        grad_x = _product(grad, weight, rows, not is_transposed, transient_bytes)
        return grad_x, None, None, None, None, None, None


def _product(
    x: Tensor, weight: BlockScaled, rows: HeadRows, is_transposed: bool, transient_bytes: int
) -> Tensor:
    num_tokens, num_heads, _ = x.shape
    width = weight.shape[1]
    out = x.new_empty(num_tokens, num_heads, width if is_transposed else rows.count)
    head_bytes = rows.count * width * (x.itemsize + _FP32_COPIES_BYTES)
    step = max(1, transient_bytes // head_bytes)
    equation = "thd,hdr->thr" if is_transposed else "thr,hdr->thd"
    for first in range(0, num_heads, step):
        heads = slice(first, first + step)
        w = _dequantise(weight, rows, heads, x.dtype)
        out[:, heads] = torch.einsum(equation, x[:, heads], w)
    return out


def _dequantise(weight: BlockScaled, rows: HeadRows, heads: slice, dtype: torch.dtype) -> Tensor:
    """W of some heads, [heads, count, r]."""
    own = slice(rows.first, rows.first + rows.count)
    num_rows, width = weight.shape
    row_scales = weight.scales.repeat_interleave(weight.block[0], 0)[:num_rows]
    scales = row_scales.unflatten(0, (-1, rows.size))[heads, own]
    values = weight.values.unflatten(0, (-1, rows.size))[heads, own].float()
    return values.mul_(scales.repeat_interleave(weight.block[1], -1)[..., :width]).to(dtype)
