"""The published checkpoint as names, shapes and dtypes, with a note of every part that is read."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.fp8 import SCALE_SUFFIX, Fp8DequantReader
from glm5.checkpoint.hf_layout import HfTensor, hf_tensors
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.config import Glm5Config
from glm5.ops.block_scaled import FP8_DTYPE


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start <= i < stop` of dimension `dim`; the whole tensor has dim None."""

    dim: int | None
    start: int
    stop: int


class PublishedTensors:
    """A TensorReader of meta tensors: what is derived from a configuration, scales included.

    `reads` has (name, part) of everything read since it was last cleared, in order.
    """

    def __init__(self, config: Glm5Config) -> None:
        self._tensors = disk_tensors(config)
        self.reads: list[tuple[str, Part]] = []

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._tensors[name].dtype)
        return dtype

    def file_of(self, name: str) -> Path:
        del name
        return Path("the published checkpoint")

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        self.reads.append((name, Part(None, 0, shape[0])))
        return torch.empty(shape, dtype=self.dtype(name), device="meta")

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = list(self.shape(name))
        shape[dim] = stop - start
        self.reads.append((name, Part(dim, start, stop)))
        return torch.empty(shape, dtype=self.dtype(name), device="meta")

    def close(self) -> None:
        """There are no files."""


def disk_tensors(config: Glm5Config) -> dict[str, HfTensor]:
    """Every tensor that the release has on disk; an FP8 one has a scale per block."""
    tensors = hf_tensors(config)
    if config.fp8 is None:
        return tensors
    rows, columns = config.fp8.weight_block_size
    float8 = str(FP8_DTYPE).removeprefix("torch.")
    listed: dict[str, HfTensor] = {}
    for name, tensor in tensors.items():
        if not tensor.quantisable:
            listed[name] = tensor
            continue
        grid = (ceil(tensor.shape[0] / rows), ceil(tensor.shape[1] / columns))
        listed[name] = HfTensor(tensor.shape, float8)
        listed[name + SCALE_SUFFIX] = HfTensor(grid, "float32")
    return listed


def open_published(config: Glm5Config) -> tuple[PublishedTensors, TensorReader]:
    """The tensors on disk, and the reader that training would read them through."""
    published = PublishedTensors(config)
    if config.fp8 is None:
        return published, published
    return published, Fp8DequantReader(published, config.fp8, getattr(torch, config.dtype))
