"""Which kernel computes the grouped product of given tensors."""

import torch
from torch import Tensor

from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_matmul import choose_tiles, grouped_matmul
from glm5.ops.grouped.triton_tiles import RowTiles


def grouped_product(
    x: Tensor, weight: Tensor | None, ends: Tensor, num_groups: int, low: Tensor | None,
    factors: Factors | None, shape: tuple[int, int], *, forward: bool, num_parts: int,
) -> Tensor:  # fmt: skip
    """See grouped_matmul: Gluon for whole tiles on Hopper, plain Triton for everything else."""
    columns = shape[1] // num_parts
    if weight is not None and _is_hopper(x):
        # Gluon is experimental: it is imported only where its kernels run.
        from glm5.ops.grouped.hopper_matmul import ROWS, fits_hopper, grouped_matmul_hopper

        if fits_hopper(x, weight, columns, 0 if factors is None else len(factors.tensors)):
            tiles = RowTiles.of(ends, len(x), ROWS)
            return grouped_matmul_hopper(
                x, weight, tiles, low, factors, shape, forward=forward, num_parts=num_parts
            )
    block = choose_tiles(x, num_groups, columns)
    tiles = RowTiles.of(ends, len(x), block.rows)
    return grouped_matmul(
        x, weight, tiles, low, factors, shape, forward=forward, num_parts=num_parts, block=block
    )


def _is_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
