"""From floating point to float8: weights by blocks, activations by pieces of their rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.ops.block_scaled.weight import BLOCK, FP8_DTYPE, FP8_MAX, BlockScaled, scale_grid


def quantise(weight: Tensor, block: tuple[int, int] = BLOCK) -> BlockScaled:
    """scale = amax / 448 of each block, values = weight / scale rounded to float8_e4m3fn.

    weight [.., out, in] of any floating dtype, on any device; a block of zeros has scale 1. The
    published FP8 checkpoints of the family are made by this formula.
    """
    rows, columns = block
    out, in_features = weight.shape[-2:]
    grid = scale_grid((out, in_features), block)
    padding = (0, grid[1] * columns - in_features, 0, grid[0] * rows - out)
    blocks = F.pad(weight.float(), padding).unflatten(-1, (grid[1], columns))
    blocks = blocks.unflatten(-3, (grid[0], rows))
    scales = _scales_of(blocks.abs().amax(dim=(-3, -1)))
    scaled = blocks / scales[..., :, None, :, None]
    values = scaled.flatten(-2).flatten(-3, -2)[..., :out, :in_features].to(FP8_DTYPE)
    return BlockScaled(values.contiguous(), scales, block)


def quantise_rows(x: Tensor, piece: int) -> tuple[Tensor, Tensor]:
    """Each row in pieces of `piece` columns: values, and scale = amax / 448 of each piece.

    x [t, n] -> values [t, n] float8_e4m3fn, scales [t, ceil(n / piece)] float32; what serving
    engines do to activations before a block-scaled product. A piece of zeros has scale 1.
    """
    weight = quantise(x, (1, piece))
    return weight.values, weight.scales


def _scales_of(amax: Tensor) -> Tensor:
    # by a number PyTorch multiplies with its reciprocal on a GPU, which has other bits
    return torch.where(amax > 0, amax / torch.full_like(amax, FP8_MAX), 1.0)
