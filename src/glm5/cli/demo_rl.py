"""`glm5 demo --rl`: a tiny model learns to sort digits from rewards alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5.checkpoint.tiny import write_tiny
from glm5.cli.demo import Check, begin_demo, export_adapter, report
from glm5.cli.plot import plot_reward
from glm5.export.export import export
from glm5.rl.run import train_rl
from glm5.rl.run_config import RlConfig
from glm5.train.metrics import read_metrics
from glm5.train.run import train
from glm5.train.run_config import RunConfig

_WARMUP_STEPS = 200
_STEPS = 60
# The learning rate rises in the first few steps, so that these still show where it started.
_FIRST_STEPS = 2
_LAST_STEPS = 5
_MOST_AT_FIRST, _LEAST_AT_LAST = 0.2, 0.8


def run_rl_demo(folder: Path, *, json: bool) -> int:
    """Runs every step in `folder`, which is made anew if an earlier demo made it.

    Raises:
        ConfigError: the folder holds something else. CheckFailedError: a step's check failed.
    """
    started = time.perf_counter()
    output = begin_demo(folder, json=json)
    hf_dir = write_tiny(folder / "hf", "5")
    output.say(f"1. wrote a tiny GLM-5-like checkpoint, tokenizer and digits to sort to {hf_dir}")
    output.say("2. supervised warm start: answer with the digits of the question, in any order")
    warmup = RunConfig.from_dict(warmup_tables(hf_dir, folder / "warmup"), source="the demo")
    train(warmup, say=output.say, quiet=json)
    export(warmup.output.dir, folder / "start", "hf")
    output.say("3. GRPO with a LoRA: the reward is 1 for ascending order, else 0")
    run = RlConfig.from_dict(
        grpo_tables(folder / "start", hf_dir / "data/sort.jsonl", folder / "run"),
        source="the demo",
    )
    train_rl(run, say=output.say, show=output.show, quiet=json)
    metrics = read_metrics(run.output.dir)
    plot = plot_reward(metrics, folder / "reward.png")
    output.say("4. exporting the adapter and loading it with transformers + peft")
    checks = [*_check_learning(metrics), *export_adapter(run.output.dir, folder / "adapter")]
    return report(output, checks, "reward curve", plot, time.perf_counter() - started)


def warmup_tables(hf_dir: Path, out_dir: Path) -> dict[str, Any]:
    """The run file of the warm start; recipes/tiny-grpo-warmup.toml says why."""
    return {
        "model": {"path": str(hf_dir), "dtype": "float32"},
        "data": {"train": str(hf_dir / "data/shuffled.jsonl"), "seq_length": 128},
        "optimizer": {"lr": 5e-3, "warmup_steps": 10},
        "train": {"steps": _WARMUP_STEPS, "global_batch_size": 4, "micro_batch_size": 4},
        "output": {"dir": str(out_dir)},
    }


def grpo_tables(start: Path, prompts: Path, out_dir: Path) -> dict[str, Any]:
    """The run file of the rest; recipes/tiny-grpo.toml says why."""
    return {
        "model": {"path": str(start), "dtype": "float32"},
        "data": {"prompts": str(prompts)},
        "lora": {"rank": 8, "alpha": 16.0},
        "optimizer": {"lr": 4e-3, "min_lr": 4e-4, "warmup_steps": 5},
        "train": {"steps": _STEPS},
        "rl": {
            "prompts_per_step": 16,
            "group_size": 8,
            "replay": "both",
            "max_tokens_per_micro_batch": 1024,
        },
        "rollout": {"engine": "hf", "max_new_tokens": 6, "max_batch": 128},
        "reward": {"kind": "exact"},
        "gap": {"max_kl": 1e-3},
        "output": {"dir": str(out_dir)},
    }


def _check_learning(metrics: Sequence[dict[str, Any]]) -> list[Check]:
    rewards = [line["reward"] for line in metrics]
    first = sum(rewards[:_FIRST_STEPS]) / _FIRST_STEPS
    last = sum(rewards[-_LAST_STEPS:]) / _LAST_STEPS
    gap = max(line.get("gap_abs_diff", 0.0) for line in metrics)
    return [
        Check(f"reward of the first {_FIRST_STEPS} steps", f"{first:.2f}", first < _MOST_AT_FIRST),
        Check(f"reward of the last {_LAST_STEPS} steps", f"{last:.2f}", last > _LEAST_AT_LAST),
        Check("largest gap_abs_diff of a step, engine and trainer", f"{gap:.1e}", gap <= 1e-5),
    ]
