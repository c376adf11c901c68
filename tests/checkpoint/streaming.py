"""Run as a program in an empty folder: prints, as JSON, the peak MiB of ways to stream 128 MiB,
and of filling a model's float8 weights from as much."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from glm5.checkpoint.block_scaled import fill_block_scaled
from glm5.checkpoint.fp8 import Fp8DequantReader
from glm5.checkpoint.rules import Rename
from glm5.checkpoint.safetensors_io import MAPPED_BYTES, SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Fp8Quantization
from glm5.ops.block_scaled import BLOCK, FP8_DTYPE, BlockScaled, scale_grid

SHAPE = (1024, 1024)
NAMES = [f"w{i}" for i in range(32)]
ONE_SHARD, SMALL_SHARDS = 2**40, 2**23
FEW_BYTES = 2**20
FP8 = Fp8Quantization(weight_block_size=BLOCK)
# 4 MiB each, too, and many rows of blocks
FLOAT8_SHAPE, BF16_SHAPE = (8192, 512), (8192, 256)


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


def read(folder: str, rows: int, mapped_bytes: int = MAPPED_BYTES) -> None:
    """Read the first rows of every tensor."""
    with SafetensorsReader(folder, mapped_bytes=mapped_bytes) as reader:
        for name in reader.names():
            assert reader.read_slice(name, 0, 0, rows)[-1, -1] == int(name[1:])


def write_float8(folder: str) -> None:
    """Block-scaled weights."""
    grid = scale_grid(FLOAT8_SHAPE, BLOCK)
    plan: dict[str, tuple[tuple[int, int], torch.dtype]] = {}
    for name in NAMES:
        plan |= {name: (FLOAT8_SHAPE, FP8_DTYPE), f"{name}_scale_inv": (grid, torch.float32)}
    with SafetensorsWriter(folder, plan, SMALL_SHARDS) as writer:
        for name in NAMES:
            writer.add(name, torch.ones(FLOAT8_SHAPE).to(FP8_DTYPE))
            writer.add(f"{name}_scale_inv", torch.ones(grid))


def write_bf16(folder: str) -> None:
    plan = dict.fromkeys(NAMES, (BF16_SHAPE, torch.bfloat16))
    with SafetensorsWriter(folder, plan, SMALL_SHARDS) as writer:
        for name in NAMES:
            writer.add(name, torch.ones(BF16_SHAPE, dtype=torch.bfloat16))


def fill_peak(folder: str, shape: tuple[int, int]) -> float:
    """Of filling weights that are there: the peak beside the model."""
    scales = scale_grid(shape, BLOCK)
    targets = [BlockScaled(torch.zeros(shape).to(FP8_DTYPE), torch.zeros(scales)) for _ in NAMES]

    def fill() -> None:
        with Fp8DequantReader(SafetensorsReader(folder), FP8, torch.bfloat16) as reader:
            for name, target in zip(NAMES, targets, strict=True):
                share = {"tp_rank": 0, "tp_size": 1, "partition_dim": None}
                fill_block_scaled(target, Rename(name, name), reader, **share)

    peak = peak_mib(fill)
    assert all((target.dequantise(torch.float32) == 1).all() for target in targets)
    return peak


if __name__ == "__main__":
    write("warm_up", ONE_SHARD)
    peaks = {
        "write one shard": peak_mib(lambda: write("one", ONE_SHARD)),
        "write small shards": peak_mib(lambda: write("small", SMALL_SHARDS)),
        "write and keep": peak_mib(lambda: write("keep", ONE_SHARD, keep=True)),
        "read": peak_mib(lambda: read("small", SHAPE[0])),
        "read one shard": peak_mib(lambda: read("one", SHAPE[0], FEW_BYTES)),
        "read slices": peak_mib(lambda: read("small", 32)),
    }
    write_float8("float8")
    write_bf16("bf16")
    # also what is loaded late
    fill_peak("bf16", BF16_SHAPE)
    peaks["fill from float8"] = fill_peak("float8", FLOAT8_SHAPE)
    peaks["fill from bf16"] = fill_peak("bf16", BF16_SHAPE)
    print(json.dumps(peaks))
