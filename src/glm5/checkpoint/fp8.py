"""FP8 checkpoints: weight = float8 value x the scale of its block (`weight_scale_inv`)."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from glm5.checkpoint.names import summarise
from glm5.checkpoint.safetensors_io import SafetensorsReader, TensorReader, check_slice
from glm5.errors import CheckpointError
from glm5.ops.block_scaled import FP8_DTYPE, BlockScaled, scale_grid

if TYPE_CHECKING:
    from glm5.config import Fp8Quantization, Glm5Config

SCALE_SUFFIX = "_scale_inv"
FLOAT8_DTYPES = (FP8_DTYPE, torch.float8_e5m2)


class Fp8DequantReader:
    """A reader over another one that hides the scales and hands out dequantised weights.

    Raises CheckpointError, naming tensors and file, for a float8 tensor without its scale, a scale
    without its float8 tensor, and a scale of the wrong dtype or shape.
    """

    def __init__(self, reader: TensorReader, fp8: Fp8Quantization, dtype: torch.dtype) -> None:
        self._reader = reader
        self.block = fp8.weight_block_size
        self._dtype = dtype
        names = reader.names()
        self._scaled = {n for n in names if reader.dtype(n) in FLOAT8_DTYPES}
        scales = {name for name in names if name.endswith(SCALE_SUFFIX)}
        self._names = [name for name in names if name not in scales]
        self._check_pairs(scales)
        for name in self._scaled:
            scale = name + SCALE_SUFFIX
            _check_dtypes(name, reader.dtype(name), reader.dtype(scale))
            _check_scale_shape(name, reader.shape(name), reader.shape(scale), self.block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the reader below."""
        self._reader.close()

    def names(self) -> list[str]:
        """Every tensor's name except the scales."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, which quantisation does not change."""
        return self._reader.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype after dequantisation."""
        return self._dtype if name in self._scaled else self._reader.dtype(name)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._reader.file_of(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor, dequantised."""
        if name not in self._scaled:
            return self._reader.read(name)
        return self._dequantised(name, self.read_block_scaled(name))

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows `start <= i < stop` of dimension `dim`, dequantised; need not fit the blocks."""
        if name not in self._scaled:
            return self._reader.read_slice(name, dim, start, stop)
        return self._dequantised(name, self.read_block_scaled(name, (dim, start, stop)))

    def is_block_scaled(self, name: str) -> bool:
        """Whether the tensor is float8 below."""
        return name in self._scaled

    def read_block_scaled(self, name: str, part: tuple[int, int, int] | None = None) -> BlockScaled:
        """A float8 tensor as it is stored, or rows `start <= i < stop` of a dimension of it:
        (dim, start, stop). In finer blocks where the part does not begin on one."""
        scale = name + SCALE_SUFFIX
        if part is None:
            return BlockScaled(self._reader.read(name), self._reader.read(scale), self.block)
        dim, start, stop = part
        check_slice(name, self.shape(name), dim, start, stop)
        size = self.block[dim]
        first, last = start // size, max(start // size, ceil(stop / size))
        return BlockScaled.starting_inside(
            self._reader.read_slice(name, dim, start, stop),
            self._reader.read_slice(scale, dim, first, last),
            self.block,
            dim,
            start - first * size,
        )

    def _dequantised(self, name: str, weight: BlockScaled) -> Tensor:
        check_block_scaled(weight, name, self.file_of(name))
        return weight.dequantise(self._dtype)

    def _check_pairs(self, scales: set[str]) -> None:
        needed = {name + SCALE_SUFFIX for name in self._scaled}
        if needed - scales:
            bare = {scale.removesuffix(SCALE_SUFFIX) for scale in needed - scales}
            raise CheckpointError(
                f"float8 tensors without their {SCALE_SUFFIX}",
                got=f"{summarise(bare)}, first in {self.file_of(min(bare))}",
                remedy="download the shards that hold the scales",
            )
        if scales - needed:
            raise CheckpointError(
                "scales without a float8 weight",
                got=f"{summarise(scales - needed)}, first in {self.file_of(min(scales - needed))}",
                remedy="weights and scales are of different checkpoints; download both again",
            )


def open_checkpoint(folder: str | Path, config: Glm5Config) -> SafetensorsReader | Fp8DequantReader:
    """Open a Hugging Face folder for reading in `config.dtype`, whether it is FP8 or not.

    Raises CheckpointError as the readers do, and for float8 tensors that config.json does not
    announce.
    """
    reader = SafetensorsReader(folder)
    if config.fp8 is not None:
        return Fp8DequantReader(reader, config.fp8, getattr(torch, config.dtype))
    float8 = {n for n in reader.names() if reader.dtype(n) in FLOAT8_DTYPES}
    if float8:
        raise CheckpointError(
            f"float8 tensors in {folder}, whose config.json has no quantization_config",
            got=summarise(float8),
            remedy="use the config.json that belongs to these files",
        )
    return reader


def check_block_scaled(weight: BlockScaled, name: str, file: Path) -> None:
    """Raise CheckpointError, naming tensor and file, unless every weight is a number.

    Waits for the device.
    """
    if weight.values.is_meta:
        return
    bad_scales, bad_values = torch.stack(weight.count_faults()).tolist()
    if not (bad_scales or bad_values):
        return
    # not how many scales: those of a part may be repeated
    faults = {"scales that are not positive or too large": bad_scales, "NaN values": bad_values}
    raise CheckpointError(
        f"{name} in {file} is not a block-scaled weight",
        got=" and ".join(fault for fault, count in faults.items() if count),
        expected="finite weights",
        remedy="the file is damaged, or was quantised from a broken model; get it again",
    )


def _check_dtypes(name: str, weight: torch.dtype, scale: torch.dtype) -> None:
    if (weight, scale) != (FP8_DTYPE, torch.float32):
        raise CheckpointError(
            f"{name} is not block-quantised FP8",
            got=f"weight {weight}, scale {scale}",
            expected=f"weight {FP8_DTYPE}, scale {torch.float32}",
            remedy="use a release with weight_scale_inv block scales, or the BF16 one",
        )


def _check_scale_shape(
    name: str, shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]
) -> None:
    if len(shape) != len(block) or scale != scale_grid((shape[0], shape[1]), block):
        raise CheckpointError(
            f"{name}{SCALE_SUFFIX} has the wrong shape",
            got=scale,
            expected=f"one scale per {block[0]}x{block[1]} block of weight shape {shape}",
            remedy="check weight_block_size in config.json against the release",
        )
