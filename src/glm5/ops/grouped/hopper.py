"""Which of the kernels for Hopper computes a product, and whether one can."""

from torch import Tensor

from glm5.ops.block_scaled import BLOCK, BlockScaled
from glm5.ops.grouped.hopper_exact import exact_matmul_hopper
from glm5.ops.grouped.hopper_fp8 import fp8_matmul_hopper
from glm5.ops.grouped.hopper_matmul import grouped_matmul_hopper
from glm5.ops.grouped.hopper_tiles import COLUMNS, DEPTH, MOST_PAIRS, SCALED_COLUMNS, SCALED_ROWS
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_tiles import RowTiles

# What TMA asks of the rows and the beginning of a tensor.
_BYTES = 16


def fits_hopper(
    x: Tensor, weight: Tensor | BlockScaled, columns: int, factors: Factors | None
) -> bool:
    """Whether the kernels take these: rows of x of a 2-byte dtype, a weight of whole tiles, of a
    part's columns and of the depth, and at most two pairs; everything begins at 16 bytes.

    A block-scaled weight has blocks of BLOCK; where it is the only one, and of one part, its edges
    may be ragged.
    """
    pairs = () if factors is None else factors.tensors
    values = weight.values if isinstance(weight, BlockScaled) else weight
    return (
        x.element_size() == 2
        and len(pairs) <= MOST_PAIRS
        and all(y.data_ptr() % _BYTES == 0 for y in (x, values, *pairs))
        and _takes_sizes(x, weight, columns)
    )


def _takes_sizes(x: Tensor, weight: Tensor | BlockScaled, columns: int) -> bool:
    if not isinstance(weight, BlockScaled):
        return columns % COLUMNS == 0 and x.shape[1] % DEPTH == 0
    if weight.block != BLOCK or weight.shape[2] % _BYTES or weight.shape[1] % (_BYTES // 2):
        return False
    # behind the edges of one weight is nothing, behind those of one of several, or of a part, is
    # the next one
    is_whole = columns % SCALED_COLUMNS == 0 and x.shape[1] % BLOCK[0] == 0
    return is_whole or (len(weight) == 1 and {columns, x.shape[1]} == set(weight.shape[1:]))


def hopper_product(
    x: Tensor, weight: Tensor | BlockScaled, tiles: RowTiles, low: Tensor | None,
    factors: Factors | None, shape: tuple[int, int], *, forward: bool, num_parts: int,
    fp8_compute: bool,
) -> Tensor:  # fmt: skip
    """See grouped_product; for what fits_hopper."""
    pairs = low, factors, shape
    if not isinstance(weight, BlockScaled):
        return grouped_matmul_hopper(x, weight, tiles, *pairs, forward=forward, num_parts=num_parts)
    tiles = RowTiles.of(tiles.ends, len(x), SCALED_ROWS)
    kernel = fp8_matmul_hopper if fp8_compute else exact_matmul_hopper
    return kernel(x, weight, tiles, *pairs, forward=forward, num_parts=num_parts)
