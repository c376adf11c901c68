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

if TYPE_CHECKING:
    from glm5.config import Fp8Quantization, Glm5Config

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max  # 448
SCALE_SUFFIX = "_scale_inv"


def dequantize_block(
    weight: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    name: str = "weight",
) -> Tensor:
    """Undo block quantisation: `w[i, j] = weight[i, j] * scale_inv[i // rows, j // columns]`.

    weight [out, in] float8_e4m3fn; scale_inv [ceil(out / rows), ceil(in / columns)] float32, so
    that the last block of either dimension may be ragged; the product is rounded once, to `dtype`.
    Raises CheckpointError, naming the tensor, for another dtype or scale shape.
    """
    _check_dtypes(name, weight.dtype, scale_inv.dtype)
    _check_scale_shape(name, tuple(weight.shape), tuple(scale_inv.shape), block)
    return _scale_blocks(weight, scale_inv, block, dtype, offset=(0, 0))


def quantize_block(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantise by blocks: `scale = amax / 448`, `values = weight / scale`.

    weight [out, in] of any float dtype; returns values [out, in] float8_e4m3fn and scale_inv
    [ceil(out / rows), ceil(in / columns)] float32. A block of zeros has scale 1.
    """
    rows, columns = block
    values = torch.empty(weight.shape, dtype=FP8_DTYPE)
    scale = torch.empty(_grid(tuple(weight.shape), block), dtype=torch.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            tile = weight[part].float()
            amax = tile.abs().max()
            scale[i, j] = amax / FP8_MAX if amax > 0 else 1.0
            values[part] = (tile / scale[i, j]).to(FP8_DTYPE)
    return values, scale


class Fp8DequantReader:
    """A reader over another one that hides the scales and hands out dequantised weights.

    Raises CheckpointError, naming tensors and file, for a float8 tensor without its scale, a scale
    without its float8 tensor, and a scale of the wrong dtype or shape.
    """

    def __init__(self, reader: TensorReader, fp8: Fp8Quantization, dtype: torch.dtype) -> None:
        self._reader = reader
        self._block = fp8.weight_block_size
        self._dtype = dtype
        names = reader.names()
        self._scaled = {n for n in names if reader.dtype(n) in (FP8_DTYPE, torch.float8_e5m2)}
        scales = {name for name in names if name.endswith(SCALE_SUFFIX)}
        self._names = [name for name in names if name not in scales]
        self._check_pairs(scales)
        for name in self._scaled:
            scale = name + SCALE_SUFFIX
            _check_dtypes(name, reader.dtype(name), reader.dtype(scale))
            _check_scale_shape(name, reader.shape(name), reader.shape(scale), self._block)

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
        weight = self._reader.read(name)
        if name not in self._scaled:
            return weight
        scale = self._reader.read(name + SCALE_SUFFIX)
        return _scale_blocks(weight, scale, self._block, self._dtype, offset=(0, 0))

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows `start <= i < stop` of dimension `dim`, dequantised; need not fit the blocks."""
        if name not in self._scaled:
            return self._reader.read_slice(name, dim, start, stop)
        check_slice(name, self.shape(name), dim, start, stop)
        size = self._block[dim]
        first, last = start // size, max(start // size, ceil(stop / size))
        weight = self._reader.read_slice(name, dim, start, stop)
        scale = self._reader.read_slice(name + SCALE_SUFFIX, dim, first, last)
        skipped = start - first * size
        offset = (skipped, 0) if dim == 0 else (0, skipped)
        return _scale_blocks(weight, scale, self._block, self._dtype, offset=offset)

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
    float8 = {n for n in reader.names() if reader.dtype(n) in (FP8_DTYPE, torch.float8_e5m2)}
    if float8:
        raise CheckpointError(
            f"float8 tensors in {folder}, whose config.json has no quantization_config",
            got=summarise(float8),
            remedy="use the config.json that belongs to these files",
        )
    return reader


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(ceil(size / step) for size, step in zip(shape, block, strict=True))


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
    if len(shape) != len(block) or scale != _grid(shape, block):
        raise CheckpointError(
            f"{name}{SCALE_SUFFIX} has the wrong shape",
            got=scale,
            expected=f"one scale per {block[0]}x{block[1]} block of weight shape {shape}",
            remedy="check weight_block_size in config.json against the release",
        )


def _scale_blocks(
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    offset: tuple[int, int],
) -> Tensor:
    """Multiply by block scales, where the weight starts `offset` inside the first block."""
    rows, columns = block
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if weight.is_meta:
        return out
    num_columns = weight.shape[1]
    # One row of blocks at a time: the fp32 copies stay small beside the weight.
    for i, row_scale in enumerate(scale):
        part = slice(max(0, i * rows - offset[0]), (i + 1) * rows - offset[0])
        per_column = row_scale.repeat_interleave(columns)[offset[1] : offset[1] + num_columns]
        out[part] = (weight[part].float() * per_column).to(dtype)
    return out
