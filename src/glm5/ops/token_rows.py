"""Rows for all places that a token goes to, and the sum of them: each other's adjoint."""

from typing import Any

import torch
from torch import Tensor

from glm5.ops.precision import FUSED_DTYPES, accumulation_dtype


def row_places(tokens: Tensor, copies: int) -> Tensor:
    """The rows of each token in ascending order: tokens[places[i, k]] = i.

    tokens [t * copies] int64, the token of each row: every one of 0 .. t - 1 has so many rows
    -> places [t, copies] int64, of the same device, which the host does not read.
    """
    return tokens.argsort(stable=True).view(-1, copies)


def copy_rows(x: Tensor, places: Tensor) -> Tensor:
    """y[places[i, k]] = x[i].

    x [t, d]; places [t, copies] int64, a permutation of 0 .. t * copies - 1
    -> y [t * copies, d] in the dtype of x. Differentiable in x: the gradient is a sum_rows.
    """
    assert x.shape[0] == places.shape[0], f"x {x.shape}, places {places.shape}"
    return _CopyRows.apply(x, places)


def sum_rows(y: Tensor, places: Tensor) -> Tensor:
    """x[i] = sum_k y[places[i, k]], in the order of k in fp32 (fp64 for fp64), rounded once.

    y [t * copies, d]; places [t, copies] int64, a permutation of 0 .. t * copies - 1
    -> x [t, d] in the dtype of y. Differentiable in y: the gradient is a copy_rows. The same bits
    every time.
    """
    assert y.shape[0] == places.numel(), f"y {y.shape}, places {places.shape}"
    return _SumRows.apply(y, places)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        if not _is_fused(x):
            return copy_rows_reference(x, places)
        # Triton is imported only where its kernels run.
        from glm5.ops.triton_token_rows import copy_rows_fused

        return copy_rows_fused(x, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return sum_rows(grad, places), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        if not _is_fused(y):
            return sum_rows_reference(y, places)
        from glm5.ops.triton_token_rows import sum_rows_fused

        return sum_rows_fused(y, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return copy_rows(grad, places), None


def _is_fused(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in FUSED_DTYPES


def copy_rows_reference(x: Tensor, places: Tensor) -> Tensor:
    """See copy_rows; not differentiable by itself."""
    y = x.new_empty(places.numel(), x.shape[1])
    for kth in places.unbind(1):
        y.index_copy_(0, kth, x)
    return y


def sum_rows_reference(y: Tensor, places: Tensor) -> Tensor:
    """See sum_rows; not differentiable by itself."""
    total = y.new_zeros(places.shape[0], y.shape[1], dtype=accumulation_dtype(y))
    for kth in places.unbind(1):
        total += y.index_select(0, kth)
    return total.to(y.dtype)
