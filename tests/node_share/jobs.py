"""Shares of narrow models, trained on a CPU in a process of their own."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from glm5.cli import main
from glm5.node_share.cut import cut_model
from glm5.node_share.measure import Share, measure_share
from glm5.node_share.node import collectives, predict, tokens_per_second
from glm5.plan.layouts import parse_layout, place
from glm5.plan.models import read_model
from glm5.plan.workload import BaseWeights, Workload
from glm5.train.sections import ATTENTION_TARGETS, MLP_TARGETS

RANKS = 8


def narrow_share(layout: str, *, base_weights: BaseWeights, tokens: int, rank: int = 0) -> Share:
    """Five layers of an eighth of GLM-5.2's widths, two of them with experts."""
    config = cut_model(read_model("GLM-5.2")[1], layers=5, narrow=8)
    work = Workload(
        base_weights=base_weights,
        seq_len=RANKS * tokens,
        targets=ATTENTION_TARGETS + MLP_TARGETS,
        expert_lora="shared_outer",
    )
    placed = place(config, parse_layout(layout), RANKS)
    return Share(config, placed, rank, work, work.seq_len, steps=3)


def measure(layout: str, base_weights: BaseWeights, rank: int) -> dict[str, Any]:
    """What a share took beside what was predicted."""
    share = narrow_share(layout, base_weights=base_weights, tokens=192, rank=rank)
    with pytest.MonkeyPatch.context() as patch:
        # the portable backend's chunks are not those of the kernels
        patch.setattr("glm5.ops.key_sets.CHUNK_BYTES", 2**22)
        # on a CPU torch's AdamW steps one weight at a time
        patch.setattr("glm5.plan.memory.STEP_BYTES", 0)
        found = measure_share(share, torch.device("cpu"), limit_gib=1)
        predicted = predict(share).memory
    return {
        "weights": [sum(found.weights.values()), predicted.weights],
        "gradients": [found.gradients, predicted.gradients],
        "optimizer": [found.optimizer, predicted.optimizer],
        "peak": [found.peak, predicted.peak],
        "parts": found.weights,
        "losses": [step.loss for step in found.steps],
        "rows": [min(found.routed_rows), max(found.routed_rows), share.balanced_rows],
        "calls": [[k.op, k.axis, k.num_calls] for k in collectives(found.step.calls)],
        "bytes": {f"{k.op} {k.axis}": k.num_bytes for k in collectives(found.step.calls)},
        "seconds": [found.step.seconds, found.step.copy_seconds],
        "tokens_per_second": tokens_per_second(share, found),
    }


def run_command(arguments: Sequence[str]) -> list[str]:
    """Exit code, standard output and standard error of `glm5 bench node-share`."""
    printed, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["glm5", "bench", "node-share", *arguments])
        patch.setenv("COLUMNS", "160")
        try:
            main()
        except SystemExit as end:
            return [str(end.code), printed.getvalue(), errors.getvalue()]
    raise AssertionError("the command did not exit")
