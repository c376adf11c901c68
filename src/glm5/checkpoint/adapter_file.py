"""adapter_model.safetensors written one tensor at a time."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

WEIGHTS_FILE = "adapter_model.safetensors"
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ADAPTER_DTYPES = tuple(_SAFETENSORS_DTYPES)


def write_adapter_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a safetensors file holding one tensor in memory; `tensors` come in the shapes' order.

    The layout is that of the safetensors format: header length (8 bytes, little-endian), JSON
    header padded with spaces to 8 bytes, then the values back to back.
    """
    with path.open("wb") as file:
        file.write(_header(shapes, dtype))
        pending = iter(shapes.items())
        for name, tensor in tensors:
            assert (name, tuple(tensor.shape)) == next(pending)
            assert tensor.dtype == dtype
            file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        assert next(pending, None) is None
        file.flush()
        os.fsync(file.fileno())


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
