"""Which kernel computes the grouped product of given tensors."""

from torch import Tensor

from glm5.ops.block_scaled import BlockScaled
from glm5.ops.devices import is_hopper
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_matmul import choose_tiles, grouped_matmul, tail_depth
from glm5.ops.grouped.triton_tiles import RowTiles


def row_tiles(x: Tensor, ends: Tensor) -> RowTiles:
    """The tiles of rows that all products of a call and of its backward share."""
    if x.element_size() != 2:
        block = 32
    else:
        few_rows = len(x) <= 64 * len(ends)
        block = 64 if few_rows and not is_hopper(x) else 128
    return RowTiles.of(ends, len(x), block)


def grouped_product(
    x: Tensor, weight: Tensor | BlockScaled | None, tiles: RowTiles, low: Tensor | None,
    factors: Factors | None, shape: tuple[int, int], *, forward: bool, num_parts: int,
    fp8_compute: bool = False,
) -> Tensor:  # fmt: skip
    """See grouped_matmul. tiles: of row_tiles.

    On Hopper the Gluon kernels where fits_hopper says so: 2-byte dtypes, at most two pairs, whole
    tiles of 256 columns of a part and of 64 of the depth, tensors that begin at 16 bytes. Plain
    Triton for everything else: any sizes, blocks and number of pairs, fp32, other GPUs.
    """
    columns = shape[1] // num_parts
    if weight is not None and is_hopper(x):
        # Gluon is experimental: it is imported only where its kernels run.
        from glm5.ops.grouped.hopper import fits_hopper, hopper_product

        if fits_hopper(x, weight, columns, factors):
            return hopper_product(
                x, weight, tiles, low, factors, shape,
                forward=forward, num_parts=num_parts, fp8_compute=fp8_compute,
            )  # fmt: skip
    tail = tail_depth(factors, forward=forward)
    is_scaled = isinstance(weight, BlockScaled)
    block = choose_tiles(x, tiles.block, columns, tail, is_scaled=is_scaled)
    if block.rows != tiles.block:
        tiles = RowTiles.of(tiles.ends, len(x), block.rows)
    return grouped_matmul(
        x, weight, tiles, low, factors, shape,
        forward=forward, num_parts=num_parts, block=block, fp8_compute=fp8_compute,
    )  # fmt: skip
