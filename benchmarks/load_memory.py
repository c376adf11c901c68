"""Host memory of one rank while it reads a checkpoint of GLM-5.2's full width.

    python -m benchmarks.load_memory FOLDER [--layout ep=8,cp=8] [--layers 4] [--bf16]

FOLDER gets the checkpoint (one value everywhere, the first layers, shards of 5 GB as published;
some 15 GB in float8, twice that in bf16), unless it has it already. One rank of the layout loads
its share with `base_weights = "fp8"`, in a process of its own, on the CPU: what the process holds
at most, as the kernel counts it (mapped pages of files included), less the model, which a GPU would
hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from glm5.checkpoint.convert import block_scaled_tensors, fill_targets, mcore_tensors
from glm5.checkpoint.fp8 import SCALE_SUFFIX, open_checkpoint
from glm5.checkpoint.fp8_config import with_fp8
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.load import build_for
from glm5.checkpoint.safetensors_file import TensorSpec
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Glm5Config
from glm5.node_share.cut import cut_model
from glm5.ops.block_scaled import BLOCK, FP8_DTYPE, scale_grid
from glm5.plan.layouts import parse_layout, smallest_world
from glm5.plan.models import read_model
from glm5.runtime.simulated import simulated_rank

GIB = 2**30


def write_checkpoint(folder: Path, layers: int, *, fp8: bool) -> None:
    """The first layers of GLM-5.2; which values they have matters to nobody here."""
    raw = cut_model(read_model("GLM-5.2")[1], layers=layers).to_hf_dict()
    raw = with_fp8(raw, BLOCK) if fp8 else raw
    config = Glm5Config.from_hf_dict(raw)
    plan: dict[str, TensorSpec] = {}
    for name, spec in hf_tensors(config).items():
        if fp8 and spec.quantisable:
            plan[name] = (spec.shape, FP8_DTYPE)
            plan[name + SCALE_SUFFIX] = (scale_grid(spec.shape, BLOCK), torch.float32)
        else:
            plan[name] = (spec.shape, getattr(torch, spec.dtype))
    with SafetensorsWriter(folder, plan) as writer:
        for name, tensor in _tensors(plan):
            writer.add(name, tensor)
        writer.add_text("config.json", json.dumps(raw))


def _tensors(plan: dict[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    for name, (shape, dtype) in plan.items():
        yield name, torch.full(shape, 0.5, dtype=torch.float32).to(dtype)


def load(folder: Path, layout_text: str) -> dict[str, float]:
    """What loading the share of rank 0 takes: GiB and seconds."""
    layout = parse_layout(layout_text)
    device = torch.device("cpu")
    with simulated_rank(0, smallest_world(layout), layout, device):
        glm5 = Glm5Config.from_hf(folder)
        (model,) = build_for(glm5, dtype="bfloat16", device=device, base_weights="fp8")
        targets = mcore_tensors(model) | block_scaled_tensors(model)
        _touch(model)
        # starts VmHWM anew (man 5 proc_pid_clear_refs)
        Path("/proc/self/clear_refs").write_text("5")
        started = time.perf_counter()
        with open_checkpoint(folder, glm5) as reader:
            fill_targets(targets, glm5_rules(glm5, include_mtp=False), reader)
        seconds = time.perf_counter() - started
        peak = _status_gib("VmHWM")
        held = sum(target.nbytes for target in targets.values()) / GIB
    return {
        "model_gib": held,
        "peak_gib": peak,
        "host_gib": peak - held,
        "seconds": seconds,
    }


def _touch(model: nn.Module) -> None:
    """Memory is the process's only once something was written to it."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().view(torch.uint8).zero_()


def _status_gib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / GIB for line in lines if line.startswith(key))


def main() -> None:
    """Writes what is missing, and measures in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", default="ep=8,cp=8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(load(options.folder, options.layout)))
        return
    if not options.folder.exists():
        write_checkpoint(options.folder, options.layers, fp8=not options.bf16)
    command = [sys.executable, "-m", "benchmarks.load_memory", *sys.argv[1:], "--here"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
