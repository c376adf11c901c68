"""adapter_model.safetensors written one tensor at a time."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.safetensors_file import SafetensorsFiles

WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_adapter_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a safetensors file of the tensors in `shapes`, holding one of them at a time."""
    files = SafetensorsFiles({path: {name: (shape, dtype) for name, shape in shapes.items()}})
    for name, tensor in tensors:
        files.write(name, tensor)
    files.check_complete()
