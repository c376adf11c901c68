"""A run file for a planned layout."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from glm5.plan.planner import Candidate
from glm5.train.run_config import RunConfig
from glm5.train.sections import MLP_TARGETS


def recipe(model: str, candidate: Candidate) -> str:
    """TOML that `glm5 train` accepts; the data and the learning rate are the user's to choose."""
    tables = recipe_tables(model, candidate)
    RunConfig.from_dict(tables, source="the recipe")
    lines = [
        f"# {candidate.place.gpus} GPUs, dp {candidate.place.dp}. Planned by `glm5 plan`.",
        "# torchrun --nnodes N --nproc_per_node GPUS_PER_NODE -m glm5 train THIS_FILE",
        "# Relative paths start at the folder of this file.",
    ]
    for section, values in tables.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def recipe_tables(model: str, candidate: Candidate) -> dict[str, dict[str, Any]]:
    """The tables of that file."""
    place, work = candidate.place, candidate.work
    layout = place.layout
    is_lora = work.mode == "lora"
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": model, "dtype": "bfloat16", "recompute": work.recompute},
        "data": {"train": "data/train.jsonl", "seq_length": work.seq_len},
        "layout": asdict(layout),
        # adapters usually take about ten times the rate of full training
        "optimizer": {"lr": 1e-4 if is_lora else 1e-5, "warmup_steps": 20},
        "train": {"steps": 500, "global_batch_size": place.gpus, "save_every": 50},
        "output": {"dir": "runs/planned"},
    }
    if work.base_weights == "fp8":
        tables["model"]["base_weights"] = "fp8"
    if layout.pp > 1:
        tables["layout"]["layers_per_stage"] = list(place.layers_per_stage)
    if is_lora:
        rank = work.adapter_rank
        tables["lora"] = {"rank": rank, "alpha": 2.0 * rank, "targets": list(work.targets)}
        if not set(MLP_TARGETS).isdisjoint(work.targets):
            tables["lora"]["expert_lora"] = work.expert_lora
    return tables


def _toml(value: Any) -> str:
    """Numbers, strings and lists are written as JSON writes them."""
    return json.dumps(value)
