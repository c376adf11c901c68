"""The rows of a grouped product in float8."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.block_scaled import FP8_DTYPE, FP8_MAX
from glm5.ops.grouped.triton_tiles import RowTiles

# Columns that share a scale.
PIECE = 128
_ROWS = 32


class QuantisedRows(NamedTuple):
    """values [t, columns up to whole pieces] float8_e4m3fn, zeros behind the last column.

    scales [pieces, num_bound * block] float32: of the tiles' rows, tile by tile, so that TMA, which
    begins at whole 16 bytes, finds those of a tile; anything where a tile has no row.
    """

    values: Tensor
    scales: Tensor


@triton.jit
def _divide(x, amax, scale):
    """x [rows, n] / scale [rows] as the division rounds it, in a third of its instructions.

    Where 1 / scale is rounded, one step of correction makes the quotient (P. Markstein, IBM Journal
    of Research and Development 34, 1990); it must not meet numbers below the normal ones.
    """
    lift = tl.where(amax < 1e-20, 18446744073709551616.0, 1.0)
    divisor = scale * lift
    inverse = tl.broadcast_to(tl.div_rn(1.0, divisor)[:, None], x.shape)
    divisor = tl.broadcast_to(divisor[:, None], x.shape)
    x *= lift[:, None]
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def _quantise_rows_kernel(
    x_ptr, values_ptr, scales_ptr, table_ptr, count_ptr, num_columns, padded_columns, scale_rows,
    MAX: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // (BLOCK // ROWS)
    in_tile = tl.program_id(0) % (BLOCK // ROWS) * ROWS
    # Entries that nobody wrote are read, but not used.
    first = tl.load(table_ptr + tile * 4 + 1) + in_tile
    last = tl.load(table_ptr + tile * 4 + 2)
    if (tile < tl.load(count_ptr)) & (first < last):
        rows = first + tl.arange(0, ROWS)
        piece = tl.program_id(1)
        columns = piece * PIECE + tl.arange(0, PIECE)
        is_row = rows < last
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :],
            mask=is_row[:, None] & (columns < num_columns)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        amax = tl.max(tl.abs(x), 1)
        scale = tl.where(amax > 0, tl.div_rn(amax, MAX), 1.0)
        values = _divide(x, amax, scale).to(tl.float8e4nv)
        if TURNED:
            quarters = tl.reshape(values, [ROWS, 4, PIECE // 4])
            values = tl.reshape(tl.permute(quarters, (0, 2, 1)), [ROWS, PIECE])
        tl.store(
            values_ptr + rows.to(tl.int64)[:, None] * padded_columns + columns[None, :],
            values, mask=is_row[:, None],
        )  # fmt: skip
        slots = tile * BLOCK + in_tile + tl.arange(0, ROWS)
        tl.store(scales_ptr + piece.to(tl.int64) * scale_rows + slots, scale, mask=is_row)


def quantise_rows_fused(x: Tensor, tiles: RowTiles, *, turned: bool = False) -> QuantisedRows:
    """See quantise_rows, of pieces of PIECE; `turned`: in each piece the columns r, r + 32, r + 64
    and r + 96 lie side by side, for r from 0 to 31.

    x [t, columns] floating, contiguous, on a GPU; tiles: of all its rows.
    """
    num_rows, num_columns = x.shape
    pieces = triton.cdiv(num_columns, PIECE)
    values = torch.empty(num_rows, pieces * PIECE, dtype=FP8_DTYPE, device=x.device)
    scale_rows = tiles.num_bound * tiles.block
    scales = torch.empty(pieces, scale_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        _quantise_rows_kernel[(scale_rows // _ROWS, pieces)](
            x, values, scales, tiles.table, tiles.num_tiles, num_columns, pieces * PIECE,
            scale_rows, MAX=FP8_MAX, TURNED=turned, BLOCK=tiles.block, ROWS=_ROWS, PIECE=PIECE,
            num_warps=4,
        )  # fmt: skip
    return QuantisedRows(values, scales)
