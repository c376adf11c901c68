"""Brings the gradients of a tile of keys to memory, in the order that suits the tensor cores."""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0], [0, 32], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [0, 16]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
LINE_ROWS = gl.constexpr(gl.SliceLayout(1, _LINES))


@gluon.jit
def add_grad_keys(grad_rows, acc):
    """Add acc [64, 64], a result of warpgroup_mma, to 64 columns of 64 rows of fp32.

    grad_rows [64] pointers, in the layout LINE_ROWS. A warp adds to 4 rows of one 128-byte line:
    smaller pieces reach the L2 slower. To make that cheap, each 16 columns are written in the
    order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, in which the columns 2i, 2i + 1, 2i + 8, 2i + 9
    that a thread holds are neighbours. put_in_order undoes it.
    """
    parts = acc.reshape([64, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    acc = gl.convert_layout(parts.reshape([64, 64]), _LINES)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, _LINES))
    gl.atomic_add(grad_rows[:, None] + columns[None, :], acc, sem="relaxed")


_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
ROW_ROWS = gl.constexpr(gl.SliceLayout(1, _ROWS))


@gluon.jit
def store_grad_keys(grad_rows, is_row, acc):
    """Write acc [64, 64], a result of warpgroup_mma, to 64 columns of 64 rows of bf16.

    grad_rows, is_row [64], in the layout ROW_ROWS. To make that cheap, each 32 columns are written
    in the order 0 1 8 9 16 17 24 25 2 3 10 11 .. 30 31, in which the columns that a thread holds
    are neighbours. key_sums undoes it.
    """
    parts = acc.to(gl.bfloat16).reshape([64, 2, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    values = gl.convert_layout(parts.reshape([64, 64]), _ROWS)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, _ROWS))
    gl.store(grad_rows[:, None] + columns[None, :], values, mask=is_row[:, None])


@triton.jit
def _put_in_order_kernel(shuffled, ordered, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # Bits 3 2 1 0 of a column are bits 1 3 2 0 of its place.
    place = (column & ~15) | ((column & 6) << 1) | ((column & 8) >> 2) | (column & 1)
    is_column = column < num_columns
    values = tl.load(shuffled + row * num_columns + place, mask=is_column)
    tl.store(ordered + row * num_columns + column, values, mask=is_column)


def put_in_order(shuffled: Tensor, ordered: Tensor) -> None:
    """Write the columns that add_grad_keys shuffled, in order and in the dtype of ordered.

    shuffled [t_k, d] fp32, ordered [t_k, d], d a multiple of 16.
    """
    t_k, d = shuffled.shape
    if t_k:
        _put_in_order_kernel[(t_k,)](shuffled, ordered, d, BLOCK=triton.next_power_of_2(d))
