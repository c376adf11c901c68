"""Strides that a matrix product takes as one product."""

from torch import Tensor


def row_major(x: Tensor) -> Tensor:
    """x with the strides of a new tensor; copied only where its elements lie in another order.

    A dimension of size 1 may have any stride and still count as contiguous. torch.matmul takes
    [s, 1, d] @ [d, n] with other strides for s products of one row, and each reads the whole
    weight.
    """
    return x.contiguous().view(x.shape)
