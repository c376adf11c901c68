"""Run as a program in an empty folder: prints, as JSON, the peak MiB of ways to stream 128 MiB."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter

SHAPE = (1024, 1024)
NAMES = [f"w{i}" for i in range(32)]
ONE_SHARD, SMALL_SHARDS = 2**40, 2**23


def peak_mib(function: Callable[[], None]) -> float:
    """The most resident memory during the call, as the kernel counts it, above that before it."""
    # starts VmHWM anew (man 5 proc_pid_clear_refs)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mib("VmRSS")
    function()
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def write(folder: str, max_shard_bytes: int, *, keep: bool = False) -> None:
    """Write transposed tensors, of which the writer needs a copy; `keep` holds all of them."""
    kept = []
    plan = dict.fromkeys(NAMES, (SHAPE, torch.float32))
    with SafetensorsWriter(folder, plan, max_shard_bytes) as writer:
        for i, name in enumerate(NAMES):
            tensor = torch.full(SHAPE, float(i)).t()
            writer.add(name, tensor)
            kept += [tensor] if keep else []


def read(folder: str, rows: int) -> None:
    """Read the first rows of every tensor."""
    with SafetensorsReader(folder) as reader:
        for name in reader.names():
            assert reader.read_slice(name, 0, 0, rows)[-1, -1] == int(name[1:])


if __name__ == "__main__":
    write("warm_up", ONE_SHARD)
    peaks = {
        "write one shard": peak_mib(lambda: write("one", ONE_SHARD)),
        "write small shards": peak_mib(lambda: write("small", SMALL_SHARDS)),
        "write and keep": peak_mib(lambda: write("keep", ONE_SHARD, keep=True)),
        "read": peak_mib(lambda: read("small", SHAPE[0])),
        "read slices": peak_mib(lambda: read("small", 32)),
    }
    print(json.dumps(peaks))
