"""Predicted against measured peak memory of training steps on a few layers of GLM-5.2.

`python -m benchmarks.plan_memory CASE` takes the full width on a GPU, and a sixteenth of it on a
CPU. Under torchrun, `--layout ep=2` shares the model over the processes. One case per process: what
a training run has allocated is not all given back.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from glm5.config import Glm5Config
from glm5.node_share.cut import narrowed, with_layers
from glm5.node_share.meter import metered
from glm5.node_share.training import adapt, random_model, step_taker, trained
from glm5.plan.hardware import GIB
from glm5.plan.layouts import Placement, parse_layout, smallest_world
from glm5.plan.memory import Memory, stage_memory, stages_of
from glm5.plan.models import read_model
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout, default_device, ensure_distributed, shut_down

STEPS = 2
ALL_LINEARS = (
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of `dense` layers and then `sparse` ones; the fourth and fifth layer share keys."""

    name: str
    dense: int
    sparse: int
    num_experts: int
    work: Workload


CASES = (
    Case("lora, 8K, full recompute", 3, 2, 256, Workload(seq_len=8192, recompute="full")),
    Case(
        "full, 4K, full recompute", 2, 1, 32,
        Workload(mode="full", seq_len=4096, recompute="full", indexer_loss=False),
    ),
    Case("lora, 8K, no recompute", 3, 2, 64, Workload(seq_len=8192, recompute="none")),
    Case(
        "full, 8K, no recompute", 1, 1, 16,
        Workload(mode="full", seq_len=8192, recompute="none", indexer_loss=False),
    ),
    Case("lora, 16K, selective", 3, 2, 64, Workload(seq_len=16384, recompute="selective")),
    Case("lora, 32K, full recompute", 3, 2, 32, Workload(seq_len=32768, recompute="full")),
    Case(
        "lora on all linears, 8K, no recompute", 1, 2, 32,
        Workload(seq_len=8192, recompute="none", targets=ALL_LINEARS),
    ),
    Case(
        "full, 16K, selective", 1, 1, 16,
        Workload(mode="full", seq_len=16384, recompute="selective", indexer_loss=False),
    ),
)  # fmt: skip


def config_of(case: Case, *, narrow: int = 1) -> Glm5Config:
    """GLM-5.2 with the case's layers; `narrow` divides every width but those of one head."""
    _, published = read_model("GLM-5.2")
    layers = case.dense + case.sparse
    mlps = ["dense"] * case.dense + ["sparse"] * case.sparse
    indexers = [("full", "shared")[i > 2] for i in range(layers)]
    raw = with_layers(published.to_hf_dict(), mlps, indexers)
    return Glm5Config.from_hf_dict(narrowed(raw | {"n_routed_experts": case.num_experts}, narrow))


def predict(config: Glm5Config, work: Workload, layout: Layout | None = None) -> Memory:
    """On one rank of a layout with a single pipeline stage."""
    layout = layout or Layout()
    split = (config.num_hidden_layers,)
    (stage,) = stages_of(config, split, 1)
    placed = Placement(layout, smallest_world(layout), split)
    return stage_memory(config, stage, placed, work, in_flight=1)


def measure(config: Glm5Config, work: Workload, device: torch.device) -> dict[str, float]:
    """Bytes: of what stays, and the peak of two steps; seconds of the second one."""
    with metered(device) as meter:
        model = random_model(config, work, device)
        adapt(model, work)
        loop = step_taker(trained(model, STEPS), work, work.seq_len, STEPS)
        for step in range(1, STEPS + 1):
            values = loop.take(step)
            assert np.isfinite(values["loss"]), values
        return {
            "peak": meter.peak,
            "stays": meter.live,
            "reserved": meter.reserved,
            "outside": meter.outside,
            "seconds": values["step_seconds"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=int, choices=range(len(CASES)), help="number of the case")
    parser.add_argument("--layout", type=parse_layout, default=Layout(), help="such as ep=2")
    parser.add_argument("--json", type=Path, help="also append one line to this file")
    options = parser.parse_args()
    device, case = default_device(), CASES[options.case]
    narrow, shorter = (1, 1) if device.type == "cuda" else (16, 64)
    ensure_distributed(device, options.layout)
    work = replace(case.work, seq_len=case.work.seq_len // shorter)
    config = config_of(case, narrow=narrow)
    predicted = predict(config, work, options.layout)
    measured = measure(config, work, device)
    if dist.get_rank() == 0:
        print(_line(case, predicted, measured), flush=True)
        if options.json:
            record = {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "command": _command(options.case, options.layout),
                "op": "plan_memory",
                "case": case.name,
                "layout": asdict(options.layout),
                "predicted_bytes": asdict(predicted),
                "measured": measured,
                "device": torch.cuda.get_device_name() if narrow == 1 else "cpu",
                "torch": torch.__version__,
            }
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    shut_down()


def _command(case: int, layout: Layout) -> str:
    ranks = dist.get_world_size()
    start = "python -m" if ranks == 1 else f"torchrun --nproc_per_node {ranks} -m"
    axes = ",".join(f"{axis}={size}" for axis, size in asdict(layout).items() if size > 1)
    return f"{start} benchmarks.plan_memory {case}" + (f" --layout {axes}" if axes else "")


def _line(case: Case, predicted: Memory, measured: dict[str, float]) -> str:
    stays = predicted.weights + predicted.gradients + predicted.optimizer
    return (
        f"{case.name:40s} peak {predicted.peak / GIB:8.3f} predicted, "
        f"{measured['peak'] / GIB:8.3f} measured, {predicted.peak / measured['peak'] - 1:+.1%}; "
        f"stays {stays / GIB:8.3f}, {measured['stays'] / GIB:8.3f}; "
        f"moving {(predicted.peak - stays) / (measured['peak'] - measured['stays']) - 1:+.1%}; "
        f"{measured['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
