"""adapter_model.safetensors, written and read one tensor at a time."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm5.checkpoint.names import summarise
from glm5.checkpoint.safetensors_file import DTYPES, SafetensorsFiles, TensorPlan
from glm5.errors import AdapterError

WEIGHTS_FILE = "adapter_model.safetensors"
Progress = Callable[[int, int], None]
ADAPTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_adapter_file(
    folder: Path,
    plan: TensorPlan,
    tensors: Iterable[tuple[str, Tensor]],
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the file of the tensors of `plan`, holding one of them at a time.

    One file, whatever its size: PEFT and vLLM look for this name alone. `progress` hears of
    (tensors written, of how many).
    """
    files = SafetensorsFiles({folder / WEIGHTS_FILE: plan})
    for done, (name, tensor) in enumerate(tensors, start=1):
        files.write(name, tensor)
        progress(done, len(plan))
    files.check_complete()


class _Entry(NamedTuple):
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class AdapterFile:
    """The tensors of an adapter folder, read in whole or by rows, each in memory of its own.

    The header is checked once; nothing stays open or mapped, so the memory in use is that of the
    tensors handed out. Raises AdapterError for a file that is missing, damaged or of dtypes that
    no adapter has; nothing is ever unpickled.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / WEIGHTS_FILE
        self._entries = _read_header(self.path)

    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, from the header."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype, from the header."""
        return self._entries[name].dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        entry = self._entries[name]
        return self._values(entry, 0, math.prod(entry.shape)).reshape(entry.shape)

    def read_row(self, name: str, index: int) -> Tensor:
        """tensor[index], of at least two dimensions; no other bytes are read."""
        entry = self._entries[name]
        rows, *rest = entry.shape
        assert 0 <= index < rows
        size = math.prod(rest)
        return self._values(entry, index * size, size).reshape(rest)

    def _values(self, entry: _Entry, first: int, count: int) -> Tensor:
        size = entry.dtype.itemsize
        # through bytes, because NumPy has no bfloat16
        values = torch.empty(count * size, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(entry.start + first * size)
            got = file.readinto(values.numpy())
        if got != len(values):
            raise AdapterError(f"{self.path} is damaged", got="it ends early", remedy=_COPY)
        return values.view(entry.dtype)


_COPY = "download or copy the file again"


def _read_header(path: Path) -> dict[str, _Entry]:
    if not path.is_file():
        held = sorted(file.name for file in path.parent.iterdir()) if path.parent.is_dir() else []
        raise AdapterError(
            f"{path} is missing",
            got=", ".join(held),
            expected="weights as safetensors; pickled adapter_model.bin is never loaded",
            remedy="save the adapter again with safe_serialization=True",
        )
    try:
        # the library checks that the header describes the file
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"{path} is damaged", got=error, remedy=_COPY) from error
    header.pop("__metadata__", None)
    _check_dtypes(path, {name: entry["dtype"] for name, entry in header.items()})
    return {
        name: _Entry(
            8 + length + entry["data_offsets"][0], tuple(entry["shape"]), DTYPES[entry["dtype"]]
        )
        for name, entry in header.items()
    }


def _check_dtypes(path: Path, dtypes: Mapping[str, str]) -> None:
    wrong = {
        f"{name} ({dtype})"
        for name, dtype in dtypes.items()
        if DTYPES.get(dtype) not in ADAPTER_DTYPES
    }
    if wrong:
        raise AdapterError(
            f"{path} holds tensors of a dtype that no adapter has",
            got=summarise(wrong),
            expected=f"one of {ADAPTER_DTYPES}",
            remedy="save the adapter again in one of them",
        )
