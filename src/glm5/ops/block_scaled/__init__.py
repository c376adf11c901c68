"""Weights in float8 with one scale for each block of them."""

from glm5.ops.block_scaled.quantise import quantise
from glm5.ops.block_scaled.weight import BLOCK, FP8_DTYPE, FP8_MAX, BlockScaled, scale_grid

__all__ = ["BLOCK", "FP8_DTYPE", "FP8_MAX", "BlockScaled", "quantise", "scale_grid"]
