"""Short training runs on tiny checkpoints, and what they leave behind."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import Tensor, nn

from glm5.checkpoint.ckpt_dir import MCORE_FOLDER, step_folder
from glm5.config import Glm5Config
from glm5.lora.attach import adapter_pairs
from glm5.train.loop import TrainLoop
from glm5.train.metrics import read_metrics
from glm5.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from glm5.train.packing import PackedRow
from glm5.train.run import load_datasets
from glm5.train.run_config import RunConfig
from glm5.train.state import TrainState
from glm5.train.trainable import build_trainable

TIMINGS = {"step_seconds", "tokens_per_second"}


def run_tables(hf_dir: Path, out_dir: Path, **sections: dict[str, Any] | None) -> dict[str, Any]:
    """A LoRA run of four steps in fp32; a section given as None is left out."""
    tables: dict[str, Any] = {
        "model": {"path": str(hf_dir), "dtype": "float32"},
        "data": {"train": str(hf_dir / "data/train.jsonl"), "seq_length": 80, "max_samples": 24},
        "lora": {"rank": 2, "alpha": 4.0},
        "optimizer": {"lr": 3e-3},
        "train": {"steps": 4, "global_batch_size": 2},
        "output": {"dir": str(out_dir)},
    }
    return with_sections(tables, sections)


def with_sections(
    tables: dict[str, Any], sections: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """The tables of a run with some keys set; a section given as None is left out."""
    changed = {name: tables.get(name, {}) | values for name, values in sections.items() if values}
    left_out = {name for name, values in sections.items() if values is None}
    return {name: table for name, table in (tables | changed).items() if name not in left_out}


def run_config(hf_dir: Path, out_dir: Path, **sections: dict[str, Any] | None) -> RunConfig:
    """The same as a RunConfig."""
    return RunConfig.from_dict(run_tables(hf_dir, out_dir, **sections), source="the test")


def write_toml(path: Path, tables: dict[str, Any]) -> Path:
    """JSON's scalars and lists are TOML's, too."""
    lines = []
    for section, values in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def start(run: RunConfig) -> TrainLoop:
    """The run, ready for its first step."""
    folder = Path(run.model.path)
    train_data, eval_data = load_datasets(run, folder, Glm5Config.from_hf(folder))
    chunks = wrap_data_parallel(build_trainable(run, folder))
    optimizer = build_optimizer(chunks, run.optimizer)
    scheduler = build_scheduler(optimizer, run.optimizer, run.train.steps)
    state = TrainState(chunks, optimizer, scheduler)
    return TrainLoop(state, train_data, eval_data, run.train, shuffle=run.data.shuffle)


def randomise_adapters(model: nn.Module, *, seed: int = 1) -> None:
    """B != 0: while it is zero, A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    for _, _, pair in adapter_pairs(model):
        values = 0.1 * torch.randn(pair.b.shape, generator=generator)
        pair.b.data.copy_(values)


def trained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and parameters that train."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every parameter and buffer."""
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if tensor is not None
    }


def batch_of(loop: TrainLoop, step: int) -> list[PackedRow]:
    """The rows of one step (from 1)."""
    return [loop.train_data[row] for row in loop.order.rows(step - 1)]


def saved_state(run_dir: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint holds, tensors and plain values, by name."""
    folder = str(step_folder(run_dir, step) / MCORE_FOLDER)
    common = dict(_flat("", dist_checkpointing.load_common_state_dict(folder)))
    tensors = dist_checkpointing.load_plain_tensors(folder)
    return common | {name: v for name, v in tensors.items() if isinstance(v, Tensor)}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _flat(f"{prefix}/{key}", item)
    else:
        yield prefix, value


def metrics_without_timing(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, less what no two runs share."""
    lines = read_metrics(run_dir)
    return [{key: v for key, v in line.items() if key not in TIMINGS} for line in lines]


def differing(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names whose tensor is not bitwise equal, or whose value is another one."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b

    assert got.keys() == expected.keys()
    return [name for name in expected if not same(got[name], expected[name])]


def write_few_chats(hf_dir: Path, path: Path, *, count: int = 3) -> str:
    """A data file of the checkpoint's first chats for evaluation."""
    lines = (hf_dir / "data/eval.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:count]))
    return str(path)


def all_finite(lines: list[dict[str, Any]], key: str) -> bool:
    return all(math.isfinite(line[key]) for line in lines)
