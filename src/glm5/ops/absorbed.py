"""Products of every head with its own rows of a frozen weight, and with a low-rank pair of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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


class HeadPair(NamedTuple):
    """delta W_h = scale * b_h a (arXiv 2106.09685), with one a for all heads.

    a [rank, r], b [h, count, rank], of the dtype of what they multiply.
    """

    a: Tensor
    b: Tensor
    scale: float


def to_latent(
    x: Tensor,
    weight: Tensor | BlockScaled,
    rows: HeadRows,
    pair: HeadPair | None = None,
    *,
    transient_bytes: int = 0,
) -> Tensor:
    """y[t, h] = [(W_h + delta W_h)^T x[t, h, :count], x[t, h, count:]], W_h [count, r] of `rows`.

    x [t, h, count + p] floating, p >= 0; weight [h * size, r], frozen; pair: of the dtype of x
    -> y [t, h, r + p], in the dtype of x, to which W is rounded. Differentiable in x, a and b. Of a
    block-scaled W no more is dequantised at a time than fits into transient_bytes with the fp32
    copies that this takes, or one head; the backward does it again. Nothing is made beside y that
    is as large.
    """
    return _apply(x, weight, rows, pair, True, transient_bytes)


def from_latent(
    x: Tensor,
    weight: Tensor | BlockScaled,
    rows: HeadRows,
    pair: HeadPair | None = None,
    *,
    transient_bytes: int = 0,
) -> Tensor:
    """y[t, h] = (W_h + delta W_h) x[t, h]: x [t, h, r] -> y [t, h, count]; else as `to_latent`."""
    return _apply(x, weight, rows, pair, False, transient_bytes)


class _Form(NamedTuple):
    """What a product is, beside its tensors."""

    rows: HeadRows
    block: tuple[int, int] | None
    scale: float
    is_to_latent: bool
    transient_bytes: int

    def weight(self, values: Tensor, scales: Tensor | None) -> Tensor | BlockScaled:
        if self.block is None or scales is None:
            return values
        return BlockScaled(values, scales, self.block)


def _apply(
    x: Tensor,
    weight: Tensor | BlockScaled,
    rows: HeadRows,
    pair: HeadPair | None,
    is_to_latent: bool,
    transient_bytes: int,
) -> Tensor:
    is_frozen = isinstance(weight, BlockScaled) or not weight.requires_grad
    assert is_frozen, "the weight of this product is frozen"
    block = weight.block if isinstance(weight, BlockScaled) else None
    scale = 0.0 if pair is None else float(pair.scale)
    form = _Form(rows, block, scale, is_to_latent, transient_bytes)
    tensors = (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight, None)
    a, b = (None, None) if pair is None else (pair.a, pair.b)
    return _HeadProduct.apply(form, x, *tensors, a, b)


class _HeadProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: _Form,
        x: Tensor,
        values: Tensor,
        scales: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
    ) -> Tensor:
        weight = form.weight(values, scales)
        y = _product(x, weight, form, to_latent=form.is_to_latent)
        low = None
        if a is not None and b is not None:
            low = _low(x, a, b, of_heads=form.is_to_latent)
            _add_low(y, low, a, b, form.scale, to_latent=form.is_to_latent)
        ctx.form = form
        ctx.save_for_backward(values, scales, x if a is not None else None, a, b, low)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        form: _Form = ctx.form
        values, scales, x, a, b, low = ctx.saved_tensors
        grad_x = _product(grad, form.weight(values, scales), form, to_latent=not form.is_to_latent)
        if a is None:
            return None, grad_x, None, None, None, None
        grad_low = _low(grad, a, b, of_heads=not form.is_to_latent)
        _add_low(grad_x, grad_low, a, b, form.scale, to_latent=not form.is_to_latent)
        if form.is_to_latent:
            of_heads, of_latent, low_of_heads, low_of_latent = x, grad, low, grad_low
        else:
            of_heads, of_latent, low_of_heads, low_of_latent = grad, x, grad_low, low
        latent = of_latent[..., : a.shape[1]].flatten(0, 1)
        grad_a = low_of_heads.flatten(0, 1).t() @ latent
        head_major = of_heads[..., : b.shape[1]].permute(1, 2, 0)
        grad_b = torch.bmm(head_major, low_of_latent.transpose(0, 1))
        return None, grad_x, None, None, grad_a.mul_(form.scale), grad_b.mul_(form.scale)


def _product(x: Tensor, weight: Tensor | BlockScaled, form: _Form, *, to_latent: bool) -> Tensor:
    """W_h^T x or W_h x of every head; what x has beyond the weight's inputs is passed on."""
    num_tokens, num_heads, _ = x.shape
    rows, latent = form.rows, weight.shape[1]
    inputs, outputs = (rows.count, latent) if to_latent else (latent, rows.count)
    y = x.new_empty(num_tokens, num_heads, outputs + x.shape[2] - inputs)
    y[..., outputs:] = x[..., inputs:]
    # written where they belong: the heads of a token lie side by side
    x_by_head, y_by_head = x[..., :inputs].transpose(0, 1), y[..., :outputs].transpose(0, 1)
    step = _heads_at_a_time(weight, form, x)
    for first in range(0, num_heads, step):
        heads = slice(first, first + step)
        w = _of_heads(weight, rows, heads, x.dtype)
        w = w if to_latent else w.transpose(1, 2)
        torch.bmm(x_by_head[heads], w, out=y_by_head[heads])
    return y


def _low(x: Tensor, a: Tensor, b: Tensor, *, of_heads: bool) -> Tensor:
    """The low-rank side [t, h, rank]: b_h^T x of what heads have, or a x of what the latent is."""
    low = x.new_empty(*x.shape[:2], b.shape[2])
    if not of_heads:
        torch.mm(x[..., : a.shape[1]].flatten(0, 1), a.t(), out=low.flatten(0, 1))
        return low
    torch.bmm(x[..., : b.shape[1]].transpose(0, 1), b, out=low.transpose(0, 1))
    return low


def _add_low(
    y: Tensor, low: Tensor, a: Tensor, b: Tensor, scale: float, *, to_latent: bool
) -> None:
    """y += scale a^T low, or scale b_h low: where y lies, rounded once from the sum in fp32."""
    if to_latent:
        y[..., : a.shape[1]].flatten(0, 1).addmm_(low.flatten(0, 1), a, alpha=scale)
    else:
        by_head = y[..., : b.shape[1]].transpose(0, 1)
        by_head.baddbmm_(low.transpose(0, 1), b.transpose(1, 2), alpha=scale)


def _heads_at_a_time(weight: Tensor | BlockScaled, form: _Form, x: Tensor) -> int:
    if not isinstance(weight, BlockScaled):
        return max(1, x.shape[1])
    head_bytes = form.rows.count * weight.shape[1] * (x.itemsize + _FP32_COPIES_BYTES)
    return max(1, form.transient_bytes // head_bytes)


def _of_heads(
    weight: Tensor | BlockScaled, rows: HeadRows, heads: slice, dtype: torch.dtype
) -> Tensor:
    """W of some heads, [heads, count, r]."""
    own = slice(rows.first, rows.first + rows.count)
    if not isinstance(weight, BlockScaled):
        return weight.unflatten(0, (-1, rows.size))[heads, own]
    num_rows, width = weight.shape
    row_scales = weight.scales.repeat_interleave(weight.block[0], 0)[:num_rows]
    scales = row_scales.unflatten(0, (-1, rows.size))[heads, own]
    values = weight.values.unflatten(0, (-1, rows.size))[heads, own].float()
    return values.mul_(scales.repeat_interleave(weight.block[1], -1)[..., :width]).to(dtype)
