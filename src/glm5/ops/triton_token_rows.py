"""Copies and sums of token rows in Triton; a program has one token and goes over its columns."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_rows_kernel(x, places, y, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        values = tl.load(x + token * width + columns, mask=mask)
        for k in tl.static_range(COPIES):
            row = tl.load(places + token * COPIES + k)
            tl.store(y + row * width + columns, values, mask=mask)


@triton.jit
def _sum_rows_kernel(y, places, x, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(COPIES):
            row = tl.load(places + token * COPIES + k)
            total += tl.load(y + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + token * width + columns, total.to(x.dtype.element_ty), mask=mask)


def copy_rows_fused(x: Tensor, places: Tensor) -> Tensor:
    """See copy_rows; for a GPU or the interpreter, not differentiable by itself."""
    x, places = x.contiguous(), places.contiguous()
    t, copies = places.shape
    y = x.new_empty(t * copies, x.shape[1])
    if y.numel():
        _copy_rows_kernel[(t,)](x, places, y, **options(x, copies))
    return y


def sum_rows_fused(y: Tensor, places: Tensor) -> Tensor:
    """See sum_rows; for a GPU or the interpreter, not differentiable by itself."""
    y, places = y.contiguous(), places.contiguous()
    t, copies = places.shape
    x = y.new_empty(t, y.shape[1])
    if x.numel():
        _sum_rows_kernel[(t,)](y, places, x, **options(y, copies))
    return x


def options(rows: Tensor, copies: int) -> dict[str, Any]:
    """What both kernels are launched with for rows [n, d]: a thread moves 16 bytes at a time."""
    width, num_warps = rows.shape[1], 4
    block = min(num_warps * 32 * 16 // rows.element_size(), triton.next_power_of_2(width))
    return {"width": width, "COPIES": copies, "BLOCK": block, "num_warps": num_warps}
