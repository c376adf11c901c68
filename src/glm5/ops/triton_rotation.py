"""Rope on some dimensions of a head and a copy of the others as one kernel each way."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _rotation_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, heads, token_stride, head_stride, width,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, FORWARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # a row is a head of a token
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = (rows < num_rows)[:, None]
    tokens, head = (rows // heads).to(tl.int64), (rows % heads).to(tl.int64)
    x_ptr += (tokens * token_stride + head * head_stride)[:, None]
    out_ptr += (rows.to(tl.int64) * width)[:, None]

    if BLOCK_REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        mask = exists & (rest < width - 2 * PAIRS)
        place = rest + 2 * PAIRS if FIRST else rest
        tl.store(out_ptr + place, tl.load(x_ptr + place, mask=mask), mask=mask)

    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = exists & (pairs < PAIRS)
    cos = tl.load(cos_ptr + tokens[:, None] * PAIRS + pairs, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + tokens[:, None] * PAIRS + pairs, mask=mask, other=0.0)
    if not FORWARD:
        sin = -sin
    start = 0 if FIRST else width - 2 * PAIRS
    if INTERLEAVED:
        both = start + tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = exists & (both < start + 2 * PAIRS)
        x = tl.load(x_ptr + both, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_ROWS, BLOCK_PAIRS, 2]))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        out = tl.reshape(turned, [BLOCK_ROWS, 2 * BLOCK_PAIRS]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + both, out, mask=mask)
    else:
        place = start + pairs
        a = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + place + PAIRS, mask=mask, other=0.0).to(tl.float32)
        out = (a * cos - b * sin).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, out, mask=mask)
        out = (b * cos + a * sin).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place + PAIRS, out, mask=mask)


class _RotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, first: bool
    ) -> Tensor:
        cos, sin = (table.float().contiguous() for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.options = {"interleaved": interleaved, "first": first}
        return rotation(x, cos, sin, forward=True, **ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = rotation(grad, *ctx.saved_tensors, forward=False, **ctx.options)
        return grad_x, None, None, None, None


def rotation(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, first: bool, forward: bool
) -> Tensor:
    """x [t, ..., d] rotated by the angles of cos and sin [t, dim // 2] fp32, or back by them."""
    t, width, num_pairs = len(x), x.shape[-1], cos.shape[1]
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    heads = math.prod(x.shape[1:-1])
    rows = x.reshape(t, heads, width)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    options = launch_options(width, num_pairs)
    grid = (triton.cdiv(t * heads, options["BLOCK_ROWS"]),)
    _rotation_kernel[grid](
        rows, cos, sin, out, t * heads, heads, rows.stride(0), rows.stride(1), width,
        PAIRS=num_pairs, FIRST=first, INTERLEAVED=interleaved, FORWARD=forward, **options,
    )  # fmt: skip
    return out


def launch_options(width: int, num_pairs: int) -> dict[str, Any]:
    """Tiles of about 4,096 elements; products and sums are rounded apart, as PyTorch does."""
    rest = width - 2 * num_pairs
    return {
        "BLOCK_ROWS": max(1, 4096 // triton.next_power_of_2(width)),
        "BLOCK_PAIRS": triton.next_power_of_2(num_pairs),
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def rotate_fused(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, first: bool) -> Tensor:
    """See rotate; in Triton, for a GPU or the interpreter."""
    return _RotationFunction.apply(x, cos, sin, interleaved, first)
