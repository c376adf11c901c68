"""A weight in float8 with one fp32 scale for each block of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max  # 448

BLOCK = (128, 128)

# All bits but the sign: the one NaN of float8_e4m3fn.
_NAN = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class BlockScaled:
    """w[.., i, j] = values[.., i, j] * scales[.., i // rows, j // columns].

    values [.., out, in] float8_e4m3fn; scales [.., ceil(out / rows), ceil(in / columns)] float32:
    the last block of either dimension may be ragged; (rows, columns) = block. Leading dimensions
    are those of a stack.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int] = BLOCK

    def __post_init__(self) -> None:
        shape = self.values.shape
        grid = scale_grid((shape[-2], shape[-1]), self.block)
        assert self.values.dtype == FP8_DTYPE, f"values {self.values.dtype}"
        assert self.scales.dtype == torch.float32, f"scales {self.scales.dtype}"
        assert self.scales.shape == (*shape[:-2], *grid), f"{self.scales.shape}, {shape}, {grid}"

    @property
    def shape(self) -> torch.Size:
        """That of the weight."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> BlockScaled:
        """One weight of a stack, as views."""
        return BlockScaled(self.values[index], self.scales[index], self.block)

    @classmethod
    def starting_inside(
        cls, values: Tensor, scales: Tensor, block: tuple[int, int], dim: int, skipped: int
    ) -> BlockScaled:
        """A weight that starts `skipped` rows (dim 0) or columns (1) inside its first block.

        scales are those of all blocks that it touches. The result has blocks that fit it, finer
        ones in `dim` where `skipped` is not 0: each has the scale of the block that it lies in.
        """
        size = block[dim]
        step = gcd(size, skipped)
        count = -(-values.shape[dim - 2] // step)
        repeated = scales.repeat_interleave(size // step, dim - 2)
        scales = repeated.narrow(dim - 2, skipped // step, count).contiguous()
        return cls(values, scales, (step, block[1]) if dim == 0 else (block[0], step))

    def in_blocks(self, block: tuple[int, int]) -> BlockScaled:
        """The same weight in blocks of another size, which divides that of its own."""
        if block == self.block:
            return self
        scales = self.scales
        for dim, (size, finer) in enumerate(zip(self.block, block, strict=True)):
            assert size % finer == 0, f"{block} in {self.block}"
            count = -(-self.shape[dim - 2] // finer)
            scales = scales.repeat_interleave(size // finer, dim - 2).narrow(dim - 2, 0, count)
        return BlockScaled(self.values, scales.contiguous(), block)

    def count_faults(self) -> tuple[Tensor, Tensor]:
        """How many (scales are not positive or too large, values are NaN), on the device.

        Too large: the greatest value times the scale is beyond fp32.
        """
        largest = self.scales * FP8_MAX
        bad_scales = ~(largest.isfinite() & (largest > 0))
        bad_values = self.values.view(torch.uint8).bitwise_and(_NAN).eq(_NAN)
        # a sum of flags would make them integers of 8 bytes first
        return bad_scales.count_nonzero(), bad_values.count_nonzero()

    def contiguous(self) -> BlockScaled:
        """The same in one piece of memory each."""
        return BlockScaled(self.values.contiguous(), self.scales.contiguous(), self.block)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """w [.., out, in], each product rounded once from fp32 to `dtype`.

        One row of blocks at a time: the fp32 copies stay small beside the result.
        """
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        if out.is_meta:
            return out
        for first in range(0, self.shape[-2], self.block[0]):
            rows = slice(first, first + self.block[0])
            scales = self.scales[..., first // self.block[0], :]
            per_column = scales.repeat_interleave(self.block[1], dim=-1)[..., : self.shape[-1]]
            out[..., rows, :] = self.values[..., rows, :].float() * per_column.unsqueeze(-2)
        return out


def scale_grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a weight [out, in] has in each dimension."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
