"""Changed copies of Hugging Face folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter

Change = Callable[[dict[str, Tensor]], None]


def rewrite(source: Path, target: Path, change: Change, **config: Any) -> Path:
    """A copy whose tensors went through `change` and whose config.json says `config`, too."""
    with SafetensorsReader(source) as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
    change(tensors)
    plan = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with SafetensorsWriter(target, plan) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    for file in source.iterdir():
        if file.is_dir():
            shutil.copytree(file, target / file.name)
        elif "safetensors" not in file.name:
            shutil.copyfile(file, target / file.name)
    set_config(target, **config)
    return target


def set_config(folder: Path, **values: Any) -> None:
    """Changes config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def drop_mtp(tensors: dict[str, Tensor]) -> None:
    """As transformers saves: without the layer after the last one."""
    last = max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    for name in [name for name in tensors if f".layers.{last}." in name]:
        del tensors[name]
