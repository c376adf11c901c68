"""Predicted against measured peak memory of training steps on a few layers of GLM-5.2.

`python -m benchmarks.plan_memory CASE` takes the full width on a GPU, and a sixteenth of it on a
CPU. Under torchrun, `--layout ep=2` shares the model over the processes. One case per process: what
a training run has allocated is not all given back.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.memory_tracker import MemoryTracker
from glm5.checkpoint.load import build_for
from glm5.config import Glm5Config
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from glm5.plan.hardware import GIB
from glm5.plan.layouts import Placement, parse_layout, smallest_world
from glm5.plan.memory import Memory, stage_memory, stages_of
from glm5.plan.models import read_model
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout, default_device, ensure_distributed, shut_down
from glm5.train.chat import TokenizedChat
from glm5.train.loop import TrainLoop
from glm5.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from glm5.train.packing import PackedDataset
from glm5.train.run_config import TrainSection
from glm5.train.sections import OptimizerSection
from glm5.train.state import TrainState

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
    raw = published.to_hf_dict()
    layers = case.dense + case.sparse
    for name in ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"):
        raw.pop(name)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "q_lora_rank", "num_attention_heads", "num_key_value_heads", "index_n_heads", "index_topk",
    ):  # fmt: skip
        raw[name] //= narrow
    raw |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": max(case.num_experts // narrow, raw["num_experts_per_tok"]),
        "first_k_dense_replace": case.dense,
        "mlp_layer_types": ["dense"] * case.dense + ["sparse"] * case.sparse,
        "indexer_types": [("full", "shared")[i > 2] for i in range(layers)],
        "eos_token_id": [1],
        "pad_token_id": 0,
    }
    return Glm5Config.from_hf_dict(raw)


def predict(config: Glm5Config, work: Workload, layout: Layout | None = None) -> Memory:
    """On one rank of a layout with a single pipeline stage."""
    layout = layout or Layout()
    split = (config.num_hidden_layers,)
    (stage,) = stages_of(config, split, 1)
    placed = Placement(layout, smallest_world(layout), split)
    return stage_memory(config, stage, placed, work, in_flight=1)


def measure(config: Glm5Config, work: Workload, device: torch.device) -> dict[str, float]:
    """Bytes: of what stays, and the peak of two steps; seconds of the second one."""
    tracker = None if device.type == "cuda" else MemoryTracker()
    if tracker is not None:
        with tracker:
            return _train(config, work, device, tracker)
    torch.cuda.reset_peak_memory_stats()
    return _train(config, work, device, None)


def _train(
    config: Glm5Config, work: Workload, device: torch.device, tracker: MemoryTracker | None
) -> dict[str, float]:
    loop = _loop(config, work, device)
    for step in range(1, STEPS + 1):
        started = time.perf_counter()
        values = loop._step(step)
        seconds = time.perf_counter() - started
        assert np.isfinite(values["loss"]), values
    if tracker is not None:
        return {"peak": tracker.peak, "stays": tracker.live, "seconds": seconds}
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "stays": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": _outside_allocator(),
        "seconds": seconds,
    }


def _outside_allocator() -> int:
    """The context, kernels and libraries."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _loop(config: Glm5Config, work: Workload, device: torch.device) -> TrainLoop:
    chunks = build_for(
        config,
        dtype="bfloat16",
        device=device,
        recompute=work.recompute,
        indexer_loss_coeff=work.indexer_loss_coeff,
    )
    (model,) = chunks
    if device.type == "cpu":
        _dispatch_as_on_a_gpu(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    if work.mode == "lora":
        spec = LoraSpec(
            adapter_rank=work.adapter_rank,
            adapter_alpha=32.0,
            targets=work.targets,
            expert_lora=work.expert_lora,
        )
        attach_lora(model, spec, seed=0)
    wrapped = wrap_data_parallel([model.train()])
    section = OptimizerSection(lr=1e-4)
    optimizer = build_optimizer(wrapped, section)
    state = TrainState(wrapped, optimizer, build_scheduler(optimizer, section, STEPS))
    rows = parallel_state.get_data_parallel_world_size()
    train = TrainSection(steps=STEPS, global_batch_size=rows)
    return TrainLoop(state, _data(config, work, rows * STEPS), None, train, shuffle=False)


def _dispatch_as_on_a_gpu(model: torch.nn.Module) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    for layer in model.modules():
        if isinstance(layer, MoELayer):
            old = layer.token_dispatcher
            layer.token_dispatcher = MoEAlltoAllTokenDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=_groups(),
            )
            del old


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def _data(config: Glm5Config, work: Workload, num_rows: int) -> PackedDataset:
    draw = np.random.default_rng(0)
    count = work.seq_len
    rows = [
        TokenizedChat(
            draw.integers(2, config.vocab_size, count).astype(np.int32), np.arange(count) > 0, "row"
        )
        for _ in range(num_rows)
    ]
    return PackedDataset(rows, count)


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
