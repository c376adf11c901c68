"""Streaming reader of sharded safetensors folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm5.checkpoint.names import summarise
from glm5.checkpoint.safetensors_file import DTYPES, tensor_bytes
from glm5.checkpoint.safetensors_index import shard_files
from glm5.errors import CheckpointError


class TensorReader(Protocol):
    """Named tensors that are read one at a time, whole or in part."""

    def names(self) -> list[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `read` gives, without reading the tensor."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU, in memory of its own."""
        ...

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows `start <= i < stop` of dimension `dim`; no other bytes are read."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


# Of a mapped shard the process keeps every page that was read, and shards are of 5 GB.
MAPPED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return tensor_bytes((self.shape, self.dtype))


class SafetensorsReader:
    """A Hugging Face folder: `model.safetensors`, or shards with their index.

    Opening it reads and checks every header: the index and the shards must name the same tensors,
    and no shard may lie outside the folder. One shard is mapped at a time, and anew once
    `mapped_bytes` of it were read, so the memory in use is that of the tensors handed out and so
    much (or a row, if that is more).
    Raises CheckpointError, naming the file, for whatever is missing, damaged or contradictory.
    """

    def __init__(self, folder: str | Path, *, mapped_bytes: int = MAPPED_BYTES) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        self._mapped: tuple[Path, Any] | None = None
        self._mapped_bytes = mapped_bytes
        self._touched = 0
        for file, listed in shard_files(self.folder).items():
            self._entries.update(_checked_entries(file, listed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the shard in use; reading again maps it again."""
        if self._mapped is not None:
            self._mapped[1].__exit__(None, None, None)
            self._mapped = None
        self._touched = 0

    def names(self) -> list[str]:
        """Every tensor's name, shard by shard."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, from the header."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype, from the header."""
        return self._entry(name).dtype

    def file_of(self, name: str) -> Path:
        """The shard that holds the tensor."""
        return self._entry(name).file

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU, in memory of its own."""
        entry = self._entry(name)
        if entry.shape:
            return self._copy(name, 0, 0, entry.shape[0])
        with _naming(entry.file):
            number: Tensor = self._map(entry.file, entry.nbytes).get_tensor(name)
        return number.clone()

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows `start <= i < stop` of dimension `dim`, contiguous; no other pages are read."""
        check_slice(name, self._entry(name).shape, dim, start, stop)
        return self._copy(name, dim, start, stop)

    def _copy(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """That slice, a few rows of dimension 0 at a time."""
        entry = self._entry(name)
        first, last = (start, stop) if dim == 0 else (0, entry.shape[0])
        within = (slice(None),) * (dim - 1) + (slice(start, stop),) * (dim > 0)
        copy = torch.empty(
            (*entry.shape[:dim], stop - start, *entry.shape[dim + 1 :]), dtype=entry.dtype
        )
        row_bytes = entry.nbytes // max(1, entry.shape[0])
        rows = max(1, self._mapped_bytes // max(1, row_bytes))
        for row in range(first, last, rows):
            end = min(row + rows, last)
            with _naming(entry.file):
                shard = self._map(entry.file, (end - row) * row_bytes)
                copy[row - first : end - first] = shard.get_slice(name)[slice(row, end), *within]
        return copy

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(
                f"no tensor {name} in {self.folder}",
                got=f"{len(self._entries)} other tensors",
                remedy="use the config.json that belongs to these files",
            )
        return self._entries[name]

    def _map(self, file: Path, num_bytes: int) -> Any:
        """The shard, of which so many bytes are about to be read."""
        is_full = self._touched + num_bytes > self._mapped_bytes
        if self._mapped is None or self._mapped[0] != file or is_full:
            self.close()
            self._mapped = (file, safe_open(file, framework="pt").__enter__())
        self._touched += num_bytes
        return self._mapped[1]


def check_slice(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> None:
    """Raise CheckpointError unless `[start, stop)` lies inside dimension `dim`."""
    # safetensors itself answers an out-of-range slice with fewer rows.
    if not (0 <= dim < len(shape) and 0 <= start <= stop <= shape[dim]):
        raise CheckpointError(
            f"{name} has no such slice",
            got=f"[{start}, {stop}) of dim {dim}",
            expected=f"a range inside shape {shape}",
            remedy="check that the model and the checkpoint have the same sizes",
        )


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn a failure to read a file into a CheckpointError that names it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors",
            got=error,
            remedy="the file is truncated or damaged; download or copy it again",
        ) from error


def _checked_entries(file: Path, listed: set[str] | None) -> dict[str, _Entry]:
    """The tensors in one shard's header, which must be those that the index lists for it."""
    with _naming(file), safe_open(file, framework="pt") as shard:
        parts = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 - not a dict
        headers = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    for what, names in {
        "lacks tensors that the index lists in it": (listed or set()) - headers.keys(),
        "holds tensors that the index does not list in it": headers.keys()
        - (headers.keys() if listed is None else listed),
    }.items():
        if names:
            raise CheckpointError(
                f"{file} {what}",
                got=summarise(names),
                remedy="index and shards are of different checkpoints; download both again",
            )
    unknown = {name for name, (dtype, _) in headers.items() if dtype not in DTYPES}
    if unknown:
        raise CheckpointError(
            f"{file} holds tensors of a dtype that is not supported",
            got=summarise({f"{name} ({headers[name][0]})" for name in unknown}),
            expected=", ".join(DTYPES),
            remedy="convert these tensors first",
        )
    return {n: _Entry(file, tuple(shape), DTYPES[dtype]) for n, (dtype, shape) in headers.items()}
