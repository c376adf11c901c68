"""Fills a model's block-scaled weights from a checkpoint, as published or quantised on the way."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from glm5.checkpoint.fp8 import Fp8DequantReader, check_block_scaled
from glm5.checkpoint.rules import Rule, part_of
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.errors import CheckpointError
from glm5.ops.block_scaled import BLOCK, BlockScaled, quantise

# Rows of blocks that are quantised at a time: the fp32 copies stay small beside the tensor.
_STRIP = 8


def fill_block_scaled(
    target: BlockScaled,
    rule: Rule,
    reader: TensorReader,
    *,
    tp_rank: int,
    tp_size: int,
    partition_dim: int | None,
) -> None:
    """Writes this rank's part of a rule's tensors through `target`, one of them at a time.

    Float8 tensors come with the bits that they are stored in; others are quantised on the target's
    device, to what quantising all of the tensor gives. The host holds one part of one tensor.

    Raises:
        CheckpointError: a source cannot be cut for this rank, is of another shape, or has values
        that are no numbers.
    """
    places = zip(rule.hf_names, rule.to_hf(target.values), rule.to_hf(target.scales), strict=True)
    for name, values, scales in places:
        part = part_of(reader, name, tp_rank, tp_size, partition_dim)
        source = read_block_scaled(reader, name, part, values.device)
        if source.shape != values.shape:
            raise CheckpointError(
                f"{name} in {reader.file_of(name)} has the wrong shape",
                got=tuple(source.shape),
                expected=tuple(values.shape),
                remedy="check that config.json and the weights belong together",
            )
        values.copy_(source.values)
        scales.copy_(source.in_blocks(target.block).scales)
        check_block_scaled(BlockScaled(values, scales, target.block), name, reader.file_of(name))


def read_block_scaled(
    reader: TensorReader, name: str, part: tuple[int, int, int] | None, device: torch.device
) -> BlockScaled:
    """A weight, or rows `start <= i < stop` of a dimension of it: (dim, start, stop).

    On the host where it is float8, else quantised and on `device`.
    """
    if isinstance(reader, Fp8DequantReader) and reader.is_block_scaled(name):
        return reader.read_block_scaled(name, part)
    block = reader.block if isinstance(reader, Fp8DequantReader) else BLOCK
    if part is None:
        return _quantise(reader.read(name), block, device)
    # a block's scale comes from all of it
    dim, start, stop = part
    size = block[dim]
    first, last = start // size * size, min(ceil(stop / size) * size, reader.shape(name)[dim])
    whole = _quantise(reader.read_slice(name, dim, first, last), block, device)
    values = whole.values.narrow(dim, start - first, stop - start)
    return BlockScaled.starting_inside(values, whole.scales, block, dim, start - first)


def _quantise(tensor: Tensor, block: tuple[int, int], device: torch.device) -> BlockScaled:
    """On `device`, a few rows of blocks at a time."""
    strips = [quantise(strip.to(device), block) for strip in tensor.split(_STRIP * block[0])]
    values = torch.cat([strip.values for strip in strips])
    return BlockScaled(values, torch.cat([strip.scales for strip in strips]), block)
