"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_loss(metrics: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draws training and evaluation loss over steps into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], label="train")
    evaluated = [m for m in metrics if "eval_loss" in m]
    axes.plot(
        [m["step"] for m in evaluated], [m["eval_loss"] for m in evaluated], "o", label="held-out"
    )
    axes.set(xlabel="optimizer step", ylabel="loss per assistant token [nat]", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def plot_reward(metrics: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draws a run's mean reward, and the gap between engine and trainer, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    reward, gap = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    reward.plot([m["step"] for m in metrics], [m["reward"] for m in metrics])
    reward.set(ylabel="mean reward", ylim=(0, 1))
    measured = [m for m in metrics if "gap_abs_diff" in m]
    gap.semilogy([m["step"] for m in measured], [m["gap_abs_diff"] for m in measured])
    gap.set(xlabel="step", ylabel="mean |trainer - engine| [nat]")
    for axes in (reward, gap):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
