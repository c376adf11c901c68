"""Run as a program in an empty folder: prints, as JSON, what converting a big model costs [MiB]."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.load import load_model
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.checkpoint.tiny import tiny_config
from glm5.checkpoint.to_megatron import convert
from glm5.config import Glm5Config
from tests.checkpoint.streaming import peak_mib

MIB = 2**20
SHARD_BYTES = 8 * MIB
# Large against what a process needs by itself, with no tensor above a few MiB.
SIZES = {"hidden_size": 512, "moe_intermediate_size": 1024, "vocab_size": 4096}


def write_big(folder: Path) -> Glm5Config:
    """A checkpoint of the family with wide experts."""
    config = Glm5Config.from_hf_dict(tiny_config("5") | SIZES)
    plan = {name: (t.shape, getattr(torch, t.dtype)) for name, t in hf_tensors(config).items()}
    with SafetensorsWriter(folder, plan, SHARD_BYTES) as writer:
        for name, (shape, dtype) in plan.items():
            writer.add(name, torch.full(shape, 0.01, dtype=dtype))
        writer.add_text("config.json", json.dumps(config.to_hf_dict()))
    return config


def load_and_keep_all(folder: Path) -> None:
    """What streaming must not do: the whole checkpoint beside the model."""
    from glm5.checkpoint.safetensors_io import SafetensorsReader

    with SafetensorsReader(folder) as reader:
        kept = [reader.read(name) for name in reader.names()]
        load_model(folder, include_mtp=True)
        del kept


def measure(function: Callable[[], object]) -> float:
    return peak_mib(lambda: void(function()))


def void(result: object) -> None:
    del result


if __name__ == "__main__":
    config = write_big(Path("hf"))
    sizes = [torch.Size(t.shape).numel() * 4 / MIB for t in hf_tensors(config).values()]
    # imports, the process group and the allocator's pools are no part of the measure
    from glm5.checkpoint.tiny import write_tiny

    convert(write_tiny("tiny", "5"), "tiny_mcore")
    figures = {
        "model": sum(sizes),
        "largest": max(sizes),
        "shard": SHARD_BYTES / MIB,
        "load and keep": measure(lambda: load_and_keep_all(Path("hf"))),
        "load": measure(lambda: load_model("hf", include_mtp=True)),
        "convert": measure(lambda: convert("hf", "mcore")),
    }
    print(json.dumps(figures))
