"""Tensors that are in memory already, where a checkpoint's reader is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.safetensors_io import check_slice


class MemoryReader:
    """A `TensorReader` of tensors by name; `file` is what messages say of where they are from.

    What it hands out are the tensors themselves and views of them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], file: Path = Path("memory")) -> None:
        self._tensors = tensors
        self._file = file

    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        return self._tensors[name].dtype

    def file_of(self, name: str) -> Path:
        """The same for all."""
        del name
        return self._file

    def read(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """A view of rows `start <= i < stop` of dimension `dim`."""
        check_slice(name, self.shape(name), dim, start, stop)
        return self._tensors[name].narrow(dim, start, stop - start)

    def close(self) -> None:
        """Nothing is open."""
