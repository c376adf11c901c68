"""Safetensors files that are laid out before their values are known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.names import summarise
from glm5.errors import CheckpointError

type TensorSpec = tuple[tuple[int, ...], torch.dtype]
type TensorPlan = Mapping[str, TensorSpec]

# Widest first, as the safetensors library sorts a file, so that all values are aligned.
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def plan_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """The plan that these tensors fulfil."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def plan_bytes(plan: TensorPlan) -> int:
    """The bytes of all values of a plan, without any header."""
    return sum(map(tensor_bytes, plan.values()))


def tensor_bytes(spec: TensorSpec) -> int:
    """The bytes of the values of one tensor."""
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFiles:
    """New files, each of its final size from the start; every tensor is written at its place.

    A file is the length of its header (8 bytes, little-endian), the header as JSON padded with
    spaces to a multiple of 8 bytes, and the values back to back
    (https://huggingface.co/docs/safetensors, "Format"). Raises CheckpointError for a planned dtype
    that is not in `DTYPES`.
    """

    def __init__(self, plans: Mapping[Path, TensorPlan]) -> None:
        self._places: dict[str, _Place] = {}
        for path, plan in plans.items():
            _check_dtypes(plan)
            header = _header(plan)
            with path.open("xb") as file:
                file.write(header)
                file.truncate(len(header) + plan_bytes(plan))
            for name, start, _ in _layout(plan):
                self._places[name] = _Place(path, len(header) + start, *plan[name])
        self._missing = set(self._places)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, of any device and layout, making one contiguous CPU copy at most.

        Raises CheckpointError for a tensor that is not planned, is written already, or has another
        shape or dtype than planned.
        """
        place = self._checked_place(name, tensor)
        with place.file.open("r+b") as file:
            file.seek(place.start)
            file.write(_values(tensor))
        self._missing.discard(name)

    def check_complete(self) -> None:
        """Raise CheckpointError, with their names, if planned tensors were not written."""
        if self._missing:
            raise CheckpointError(
                "planned tensors were not written",
                got=summarise(self._missing),
                expected=f"all {len(self._places)} tensors of the plan",
                remedy="add every planned tensor, or leave it out of the plan",
            )

    def _checked_place(self, name: str, tensor: Tensor) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{name} is not in the plan", remedy="plan every tensor")
        if name not in self._missing:
            raise CheckpointError(f"{name} is written twice", remedy="write each tensor once")
        if (tuple(tensor.shape), tensor.dtype) != (place.shape, place.dtype):
            raise CheckpointError(
                f"{name} is not as planned",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                expected=f"{place.dtype} {place.shape}",
                remedy="plan the shape and dtype that is written",
            )
        return place


def _check_dtypes(plan: TensorPlan) -> None:
    unknown = {f"{name} ({dtype})" for name, (_, dtype) in plan.items() if dtype not in _NAMES}
    if unknown:
        raise CheckpointError(
            "these dtypes cannot be written as safetensors",
            got=summarise(unknown),
            expected=", ".join(map(str, _NAMES)),
            remedy="convert these tensors first",
        )


def _layout(plan: TensorPlan) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of every tensor in the values, in the order of the library's files."""
    order = list(DTYPES.values())
    start = 0
    for name in sorted(plan, key=lambda name: (order.index(plan[name][1]), name)):
        end = start + tensor_bytes(plan[name])
        yield name, start, end
        start = end


def _header(plan: TensorPlan) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, *offsets in _layout(plan):
        shape, dtype = plan[name]
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(tensor: Tensor) -> memoryview:
    """The values in C order, not copied if the tensor holds them so on the CPU."""
    host = tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
    # through bytes, because NumPy has no bfloat16 and no float8
    return host.reshape(-1).view(torch.uint8).numpy().data
