"""Checkpoints rewritten as block-scaled FP8: what does not change keeps its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.fp8 import (
    SCALE_SUFFIX,
    Fp8DequantReader,
    check_block_scaled,
    open_checkpoint,
)
from glm5.checkpoint.fp8_config import quantisable_names, with_fp8
from glm5.checkpoint.hf_files import add_small_files
from glm5.checkpoint.safetensors_file import TensorSpec
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Glm5Config
from glm5.ops.block_scaled import BLOCK, FP8_DTYPE, BlockScaled, quantise, scale_grid

type Weight = Tensor | BlockScaled
type _Reader = SafetensorsReader | Fp8DequantReader


def rewrite_as_fp8(
    source: Path,
    target: Path,
    glm5: Glm5Config,
    change: Callable[[str, Weight], Weight] = lambda name, weight: weight,
) -> None:
    """Writes `source` anew through `change`, with every quantised linear in float8.

    `change` sees what the folder of a quantised release stores as BlockScaled, and what will be
    quantised here in float32, so that nothing is rounded in between; other tensors in their dtype.
    It keeps the shape, and the dtype of what stays unquantised; a Tensor in place of a BlockScaled
    is quantised as a whole. The quantization_config of a release stays as published; a checkpoint
    without gets one of 128x128 blocks. The folder appears complete or not at all; one weight is in
    memory at a time.

    Raises:
        CheckpointError: a scale is missing or wrong, a weight is no number, or `target` holds
        something.
    """
    written = glm5 if glm5.fp8 is not None else _quantised_config(glm5)
    assert written.fp8 is not None
    block = written.fp8.weight_block_size
    with open_checkpoint(source, glm5) as reader:
        quantised = _quantised(reader, glm5)
        with SafetensorsWriter(target, dict(_plan(reader, quantised, block))) as writer:
            for name in reader.names():
                weight = change(name, _read(reader, name, quantised))
                if name in quantised:
                    scaled = weight if isinstance(weight, BlockScaled) else quantise(weight, block)
                    writer.add(name, scaled.values)
                    writer.add(name + SCALE_SUFFIX, scaled.scales)
                else:
                    assert isinstance(weight, Tensor), f"{name} is not quantised"
                    writer.add(name, weight)
            add_small_files(writer, source, written)


def add_to_blocks(weight: BlockScaled, delta: Tensor) -> BlockScaled:
    """weight + delta [out, in] fp32: blocks in which delta is 0 keep their bytes and their scale.

    The others are dequantised in fp32, summed, and quantised with a new scale.
    """
    summed = quantise(weight.dequantise(torch.float32) + delta, weight.block)
    changed = _changed_blocks(delta, weight.block)
    rows, columns = weight.block
    per_value = changed.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    per_value = per_value[: weight.shape[0], : weight.shape[1]]
    # through bytes: torch selects among no float8 values
    values = torch.where(
        per_value, summed.values.view(torch.uint8), weight.values.view(torch.uint8)
    )
    scales = torch.where(changed, summed.scales, weight.scales)
    return BlockScaled(values.view(FP8_DTYPE), scales, weight.block)


def _changed_blocks(delta: Tensor, block: tuple[int, int]) -> Tensor:
    """[grid of blocks] bool: where any value of delta [out, in] is not 0."""
    (rows, columns), (out, in_features) = block, delta.shape
    grid = scale_grid((out, in_features), block)
    padding = (0, grid[1] * columns - in_features, 0, grid[0] * rows - out)
    padded = torch.nn.functional.pad(delta != 0, padding)
    return padded.view(grid[0], rows, grid[1], columns).any(3).any(1)


def _quantised_config(glm5: Glm5Config) -> Glm5Config:
    raw = with_fp8(glm5.to_hf_dict(), BLOCK)
    return Glm5Config.from_hf_dict(raw).model_copy(update={"latent_norm_eps": glm5.latent_norm_eps})


def _quantised(reader: _Reader, glm5: Glm5Config) -> set[str]:
    """What is float8 in the folder that is written: of a release what it has so itself."""
    if isinstance(reader, Fp8DequantReader):
        return {name for name in reader.names() if reader.is_block_scaled(name)}
    return quantisable_names(glm5)


def _plan(
    reader: _Reader, quantised: set[str], block: tuple[int, int]
) -> Iterator[tuple[str, TensorSpec]]:
    """Of what is written; a scale stands behind its weight."""
    for name in reader.names():
        shape = reader.shape(name)
        if name in quantised:
            yield name, (shape, FP8_DTYPE)
            yield name + SCALE_SUFFIX, (scale_grid((shape[0], shape[1]), block), torch.float32)
        else:
            yield name, (shape, reader.dtype(name))


def _read(reader: _Reader, name: str, quantised: set[str]) -> Weight:
    if isinstance(reader, Fp8DequantReader) and name in quantised:
        weight = reader.read_block_scaled(name)
        check_block_scaled(weight, name, reader.file_of(name))
        return weight
    tensor = reader.read(name)
    return tensor.float() if name in quantised else tensor
