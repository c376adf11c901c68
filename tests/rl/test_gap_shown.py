"""The gap of real runs: rounding where choices are replayed, more where not, and stale weights."""

import json
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.checkpoint.ckpt_dir import saved_steps
from glm5.config import Glm5Config
from glm5.errors import DivergedError, GapError
from glm5.lora.switch import without_adapters
from glm5.rl.batch import PolicyBatcher
from glm5.rl.choices import ChoiceShape
from glm5.rl.engines.hf import HfEngine
from glm5.rl.first_rank import FirstRank
from glm5.rl.gap import Gap
from glm5.rl.gap_meter import GapMeter
from glm5.rl.loop import RlLoop
from glm5.rl.passes import Batch, Passes, Replayer, Scores
from glm5.rl.rollout import Rollout
from glm5.rl.row import Document
from glm5.rl.run import train_rl
from glm5.rl.sync import WeightSync
from glm5.train.metrics import read_metrics
from glm5.train.state import TrainState
from glm5.train.trainable import build_state, build_trainable
from tests.rl.engines.prompts import make_requests, make_sampling
from tests.rl.running import FakeEngine, rl_config
from tests.tiny_models import TinyFolder
from tests.training import randomise_adapters, saved_state

ROUNDING = 1e-5
"""Mean difference of two programs in fp32 that choose alike [nats]; it is about 1.5e-6."""


@dataclass(frozen=True)
class Compared:
    """The gap of one step with the run's replay and without, by the same weights and tokens."""

    replayed: Gap
    free: Gap


def compare(monkeypatch: pytest.MonkeyPatch, *steps: int) -> dict[int, Compared]:
    """Of these steps of the run that follows, once it has taken them."""
    found: dict[int, Compared] = {}
    score, numbers = RlLoop._score, count(1)

    def both(loop: RlLoop, batch: Batch, documents: list[Document]) -> tuple[Scores, Gap]:
        scores, gap = score(loop, batch, documents)
        step = next(numbers)
        if step in steps:
            free = replace(batch, replayer=replace(batch.replayer, recorded="none"))
            found[step] = Compared(gap, measured(loop._passes, free, documents))
        return scores, gap

    monkeypatch.setattr(RlLoop, "_score", both)
    return found


def measured(passes: Passes, batch: Batch, documents: list[Document]) -> Gap:
    meter = GapMeter()
    passes.score(batch, meter)
    return meter.reduce({d.number: d.rollout for d in documents}, len(documents))


def long_sections(dtype: str, engine_dtype: str) -> dict[str, Any]:
    """Every prompt is longer than the 8 keys that the tiny models select."""
    return {
        "model": {"dtype": dtype},
        "optimizer": {"lr": 3e-3},
        "rl": {
            "replay": "both",
            "prompts_per_step": 4,
            "updates": 4,
            "max_tokens_per_micro_batch": 512,
        },
        "rollout": {"max_new_tokens": 12, "dtype": engine_dtype},
    }


@pytest.mark.parametrize(
    ("engine_dtype", "steps"), [("bfloat16", 6), ("float32", 1)], ids=["bf16", "fp32"]
)
def test_replay_closes_most_of_the_gap_of_bf16(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_dtype: str,
    steps: int,
) -> None:
    """Before the first update and after twenty, four a step. What is left is bf16's rounding."""
    out, found = tmp_path / "run", compare(monkeypatch, 1, steps)
    sections = long_sections("bfloat16", engine_dtype)
    train_rl(rl_config(tiny_folder("5.2"), out, **sections, train={"steps": steps}), quiet=True)
    assert found.keys() == {1, steps}
    for step in found.values():
        assert step.free.abs_diff >= 5 * step.replayed.abs_diff
        assert step.free.kl >= 25 * step.replayed.kl
        # both kinds of choices are in it
        assert all(0.9 < share < 1 for share in step.replayed.overlaps.values())
    assert all(line["groups_taught"] == 1 for line in read_metrics(out))
    assert largest_b(out, steps) > 4e-3 * steps


def test_replay_closes_the_gap_of_fp32(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """At the start, and when the adapter has moved far.

    At twice this rate logits grow so steep that rounding alone moves a ratio by 5e-4.
    """
    out = tmp_path / "run"
    sections = long_sections("float32", "float32") | {"optimizer": {"lr": 0.05}}
    train_rl(rl_config(tiny_folder("5.2"), out, **sections), quiet=True)
    lines = read_metrics(out)
    assert len(lines) == 3 and all(line["gap_abs_diff"] <= ROUNDING for line in lines)
    assert all(abs(line[f"gap_ratio_{end}"] - 1) < 1e-4 for line in lines for end in ("min", "max"))
    assert largest_b(out, 3) > 0.1


def test_documents_that_select_every_key_replay_experts_alone(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """They attend densely: of at most index_topk tokens, in a run that replays both kinds."""
    prompts, out = tmp_path / "short.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "abc", "b")))
    sections = long_sections("float32", "float32") | {
        "data": {"prompts": str(prompts), "raw": True},
        "rollout": {"max_new_tokens": 5},
        "train": {"steps": 2},
    }
    train_rl(rl_config(tiny_folder("5.2"), out, **sections), quiet=True)
    for line in read_metrics(out):
        assert line["gap_abs_diff"] <= ROUNDING and line["gap_routing_overlap"] > 0.99
        assert "gap_topk_overlap" not in line and line["grad_norm"] > 0


def largest_b(out: Path, step: int) -> float:
    """Of all adapters; they start with B = 0."""
    state = saved_state(out, step)
    return max(float(v.abs().max()) for name, v in state.items() if name.endswith(".b"))


@dataclass
class Sides:
    """A trainer and an engine with the same base, and how the one's weights reach the other."""

    state: TrainState
    engine: HfEngine
    sync: WeightSync

    def rollouts(self) -> list[Rollout]:
        requests = make_requests((12, 21, 9, 30))
        return self.engine.generate(requests, make_sampling(max_new_tokens=8), record="both")

    def gap(self, rollouts: list[Rollout]) -> Gap:
        """Of the trainer's weights of now to those that drew the completions."""
        documents = [Document(n, rollout, 0.0) for n, rollout in enumerate(rollouts)]
        shape = ChoiceShape.from_config(self.state.chunks[0].module.config.glm5)
        choices = {document.number: document.rollout.choices for document in documents}
        row = PolicyBatcher(512, 0).row(documents)
        passes = Passes(self.state, 512, temperature=1.0, normalise="token")
        return measured(passes, Batch([[row]], Replayer("both", shape, choices)), documents)


@pytest.fixture
def sides(tiny_folder: TinyFolder, tmp_path: Path) -> Sides:
    folder = tiny_folder("5.2")
    run = rl_config(folder, tmp_path / "run")
    state = build_state(run, build_trainable(run, folder))
    engine = HfEngine(folder, Glm5Config.from_hf(folder), torch.device("cpu"))
    chunks = [chunk.module for chunk in state.chunks]
    return Sides(state, engine, WeightSync(run, chunks, folder, FirstRank(1.0)))


def test_a_perturbed_adapter_moves_both_sides_equally(sides: Sides) -> None:
    sides.sync.hand_over(sides.engine, 0)
    before = sides.rollouts()
    assert sides.gap(before).abs_diff <= ROUNDING
    randomise_adapters(sides.state.chunks[0].module)
    # the engine has not heard of it, and the same tokens tell
    assert sides.gap(before).abs_diff > 1e4 * ROUNDING
    sides.sync.hand_over(sides.engine, 1)
    after = sides.rollouts()
    assert sides.gap(after).abs_diff <= ROUNDING
    with without_adapters(sides.state.chunks):
        assert sides.gap(after).abs_diff > 1e4 * ROUNDING
        # where it was before
        assert sides.gap(before).abs_diff <= ROUNDING


class Deaf(HfEngine):
    """Says that it took every adapter, and samples with the first one."""

    def load_adapter(self, folder: Path, version: int) -> None:
        if version == 0:
            super().load_adapter(folder, version)
        self._version = version


def test_an_adapter_that_is_stale_in_secret_stops_the_run(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Its version is right, but one update makes a gap of 0.08 nat, and rounding one of 1.5e-6."""
    folder, out = tiny_folder("5.2"), tmp_path / "run"
    run = rl_config(folder, out, rl={"replay": "both"}, gap={"max_abs_diff": 1e-4})
    engine = Deaf(folder, Glm5Config.from_hf(folder), torch.device("cpu"))
    with pytest.raises(GapError, match=r"(?s)tokens of step 2.*over max_abs_diff 0\.0001.*worst"):
        train_rl(run, engine=engine, quiet=True)
    # what came before the update that would have been wrong
    assert saved_steps(out) == [1]


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_log_probabilities_that_are_no_numbers_stop_the_run(
    tiny_folder: TinyFolder, tmp_path: Path, bad: float
) -> None:
    """Without any limit in [gap], and with all else as it was."""

    def spoil(rollouts: list[Rollout]) -> list[Rollout]:
        for rollout in rollouts[:2]:
            rollout.log_probs[-1] = bad
        return rollouts

    out = tmp_path / "run"
    run = rl_config(tiny_folder("5"), out, rollout={"max_new_tokens": 6})
    stopped = r"(?s)2 of \d+ log-probabilities.*not finite.*worst token"
    with pytest.raises(DivergedError, match=stopped):
        train_rl(run, engine=FakeEngine(change=spoil), quiet=True)
    assert saved_steps(out) == []
