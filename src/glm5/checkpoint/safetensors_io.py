"""Streaming reader and writer of sharded safetensors folders."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glm5.checkpoint.names import summarise
from glm5.checkpoint.safetensors_index import INDEX_FILE, shard_files
from glm5.errors import CheckpointError

SHARD_BYTES = 5 * 10**9

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsReader:
    """A Hugging Face folder: `model.safetensors`, or shards with their index.

    Opening it reads and checks every header: the index and the shards must name the same tensors,
    and no shard may lie outside the folder. One shard is mapped at a time, so the memory in use is
    that of the tensors handed out plus the pages touched in one shard, which the system may drop.
    Raises CheckpointError, naming the file, for whatever is missing, damaged or contradictory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        self._mapped: tuple[Path, Any] | None = None
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
        with _naming(entry.file):
            tensor: Tensor = self._map(entry.file).get_tensor(name)
        return tensor.clone()

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows `start <= i < stop` of dimension `dim`, contiguous; no other pages are read."""
        entry = self._entry(name)
        check_slice(name, entry.shape, dim, start, stop)
        index = (slice(None),) * dim + (slice(start, stop),)
        with _naming(entry.file):
            tensor: Tensor = self._map(entry.file).get_slice(name)[index]
        return tensor.clone(memory_format=torch.contiguous_format)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(
                f"no tensor {name} in {self.folder}",
                got=f"{len(self._entries)} other tensors",
                remedy="use the config.json that belongs to these files",
            )
        return self._entries[name]

    def _map(self, file: Path) -> Any:
        if self._mapped is None or self._mapped[0] != file:
            self.close()
            self._mapped = (file, safe_open(file, framework="pt").__enter__())
        return self._mapped[1]


class SafetensorsWriter:
    """Write a Hugging Face folder tensor by tensor; the folder appears whole, at `close`, or not.

    Tensors are copied into a shard of at most `max_shard_bytes` (or one larger tensor), which is
    written to a hidden sibling folder as soon as the next tensor would not fit. As a context
    manager it closes on success and removes what it wrote on an exception. Raises CheckpointError
    for a folder that is not empty and for a tensor or file name that is given twice. A process
    that is killed leaves the hidden `.<name>.partial-*` folder behind, which may be removed.
    """

    def __init__(self, folder: str | Path, max_shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = Path(folder).absolute()
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        check_is_free(self.folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, so that the final rename stays within one file system.
        self._work = self.folder.with_name(f".{self.folder.name}.partial-{secrets.token_hex(4)}")
        self._work.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, of any device and layout; it is copied, so the caller may reuse it."""
        if name in self._names:
            raise CheckpointError(
                f"{name} is written twice to {self.folder}", remedy="write each tensor once"
            )
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._write_shard()
        self._names.add(name)
        self._pending[name] = tensor.detach().to(
            "cpu", copy=True, memory_format=torch.contiguous_format
        )
        self._pending_bytes += tensor.nbytes

    def add_text(self, name: str, text: str) -> None:
        """Write a small file such as config.json beside the shards, as UTF-8."""
        self._free_path(name).write_text(text, encoding="utf-8")

    def copy_file(self, source: str | Path) -> None:
        """Copy a file such as tokenizer.json beside the shards, under its own name."""
        source = Path(source)
        shutil.copyfile(source, self._free_path(source.name))

    def close(self) -> None:
        """Write the last shard and the index, then put the folder in its place in one step."""
        try:
            self._write_shard()
            self._name_shards()
            self._publish()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove everything written so far; the target folder is left as it was."""
        self._pending.clear()
        shutil.rmtree(self._work, ignore_errors=True)

    def _write_shard(self) -> None:
        if not self._pending:
            return
        path = self._work / _unnumbered(len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        # save_file makes it readable by its owner only; give it the access of its folder.
        path.chmod(self._work.stat().st_mode & 0o666)
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        """Give the shards their final names, which hold the number of shards."""
        weight_map: dict[str, str] = {}
        count = len(self._shards)
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._work / _unnumbered(number)).rename(self._work / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        self.add_text(INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _publish(self) -> None:
        # rename() replaces nothing but an empty folder, also if another process was faster.
        check_is_free(self.folder)
        self._work.rename(self.folder)

    def _free_path(self, name: str) -> Path:
        relative = Path(name)
        path = self._work / relative
        if relative.is_absolute() or ".." in relative.parts or path.exists():
            raise CheckpointError(
                f"cannot write a file {name!r} to {self.folder}",
                expected="a relative path inside the folder that was not used before",
                remedy="write each file once",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def check_is_free(folder: Path) -> None:
    """Raise CheckpointError unless the folder is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} already exists and is not an empty folder",
            remedy="choose another folder, or remove this one first",
        )


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


def _unnumbered(number: int) -> str:
    return f"shard-{number:05d}.partial"


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
    unknown = {name for name, (dtype, _) in headers.items() if dtype not in _DTYPES}
    if unknown:
        raise CheckpointError(
            f"{file} holds tensors of a dtype that is not supported",
            got=summarise({f"{name} ({headers[name][0]})" for name in unknown}),
            expected=", ".join(_DTYPES),
            remedy="convert these tensors first",
        )
    return {n: _Entry(file, tuple(shape), _DTYPES[dtype]) for n, (dtype, shape) in headers.items()}
