"""`glm5 demo`: the whole job on a tiny model, on real files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5.checkpoint.tiny import write_tiny
from glm5.cli.output import Output
from glm5.cli.plot import plot_loss
from glm5.cli.verify import show_report, verify_checkpoint
from glm5.errors import CheckFailedError, ConfigError
from glm5.export.export import export
from glm5.train.metrics import read_metrics
from glm5.train.run import train
from glm5.train.run_config import RunConfig

_MARKER = ".glm5-demo"
_MADE = ("hf", "run", "adapter", "loss.png", "warmup", "start", "reward.png")
_STEPS = 60


@dataclass(frozen=True)
class Check:
    """One line of the closing table."""

    what: str
    figure: str
    ok: bool


def run_demo(folder: Path, *, json: bool) -> int:
    """Runs every step in `folder`, which is made anew if an earlier demo made it.

    Raises:
        ConfigError: the folder holds something else. CheckFailedError: a step's check failed.
    """
    started = time.perf_counter()
    output = begin_demo(folder, json=json)
    hf_dir = write_tiny(folder / "hf", "5.2")
    output.say(f"1. wrote a tiny GLM-5.2-like checkpoint, tokenizer and chats to {hf_dir}")
    checks = [_verify(output, hf_dir)]
    output.say("3. training a LoRA on attention, experts and dense MLPs")
    run = _run_config(hf_dir, folder / "run")
    train(run, say=output.say, quiet=json)
    metrics = read_metrics(run.output.dir)
    plot = plot_loss(metrics, folder / "loss.png")
    checks.append(_check_learning(metrics))
    output.say("4. exporting the adapter and loading it with transformers + peft")
    checks += export_adapter(run.output.dir, folder / "adapter")
    return report(output, checks, "loss curve", plot, time.perf_counter() - started)


def begin_demo(folder: Path, *, json: bool) -> Output:
    """Where a demo tells what it does, with the folder its own.

    Raises:
        ConfigError: the folder holds something else than a demo.
    """
    # the tiny model's operations are too small to share: threads would only wait for each other
    torch.set_num_threads(1)
    take_demo_folder(folder)
    return Output(json)


def take_demo_folder(folder: Path) -> None:
    """Makes the folder of a demo, or empties that of an earlier one.

    Raises:
        ConfigError: it holds something else.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        _remove_demo(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()


def _remove_demo(folder: Path) -> None:
    """Removes what an earlier demo made, its folders with all that is in them, and nothing else."""
    held = list(folder.iterdir()) if (folder / _MARKER).is_file() else []
    foreign = sorted(path.name for path in held if not _is_made(path.name))
    if not held or foreign:
        raise ConfigError(
            f"{folder} holds something that is not a demo",
            got=", ".join(foreign) or None,
            expected="a new or empty folder, or one that an earlier demo made",
            remedy="name another folder: glm5 demo DIR",
        )
    for path in held:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_made(name: str) -> bool:
    interrupted = any(name.startswith(f".{made}.") for made in _MADE)
    return name in (*_MADE, _MARKER) or interrupted


def _verify(output: Output, hf_dir: Path) -> Check:
    output.say("2. comparing it with transformers, in fp32")
    report = verify_checkpoint(str(hf_dir))
    show_report(output, report)
    worst = max(finding.error for finding in report.findings if finding.quantity == "logits")
    return Check("logits of the base, glm5 against transformers", f"{worst:.1e}", report.ok)


def _run_config(hf_dir: Path, out_dir: Path) -> RunConfig:
    tables: dict[str, Any] = {
        "model": {"path": str(hf_dir), "dtype": "float32"},
        "data": {
            "train": str(hf_dir / "data" / "train.jsonl"),
            "eval": str(hf_dir / "data" / "eval.jsonl"),
            "seq_length": 256,
        },
        "lora": {"rank": 8, "alpha": 16.0},
        "optimizer": {"lr": 1e-2, "warmup_steps": 5},
        "train": {"steps": _STEPS, "global_batch_size": 4, "micro_batch_size": 4},
        "output": {"dir": str(out_dir)},
    }
    return RunConfig.from_dict(tables, source="the demo's settings")


def _check_learning(metrics: Sequence[dict[str, Any]]) -> Check:
    first, last = metrics[0]["loss"], metrics[-1]["loss"]
    figure = f"{first:.2f} -> {last:.2f}, held-out {metrics[-1]['eval_loss']:.2f}"
    return Check(f"training loss over {len(metrics)} steps", figure, last < 0.7 * first)


def export_adapter(run_dir: Path, out_dir: Path) -> list[Check]:
    """Exports the adapter of a run, and says what was proved of it."""
    checks = export(run_dir, out_dir, "adapter")
    return [
        Check(f"logits of the adapter, glm5 against {check.what}", f"{check.error:.1e}", check.ok)
        for check in checks
    ]


def report(output: Output, checks: Sequence[Check], curve: str, plot: Path, seconds: float) -> int:
    """Shows what was checked and where things are; the exit code."""
    rows = [(check.what, check.figure, check.ok) for check in checks]
    output.table("what was checked", ("check", "figure", ""), rows)
    output.result(
        {
            curve: str(plot),
            "adapter": str(plot.parent / "adapter"),
            "seconds": round(seconds, 1),
            **({"checks": [vars(check) for check in checks]} if output.as_json else {}),
        }
    )
    return 0 if all(check.ok for check in checks) else CheckFailedError.exit_code
