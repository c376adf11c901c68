"""What the model wrote: one JSONL table for each step, and a few completions for the screen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from glm5.rl.collect import Decode, Group
from glm5.rl.printable import printable
from glm5.rl.rewards import Label
from glm5.rl.rollout import Finish
from glm5.rl.row import Document

SAMPLES_FOLDER = "samples"
# Of a long text the screen shows this many characters, of both ends.
SHOWN_CHARS = 160


@dataclass(frozen=True)
class Sample:
    """One completion and what became of it.

    advantage: None where its group taught nothing and was left out. num_tokens: of the response.
    abs_diff: mean |log-probability of the trainer - of the engine| [nats]; NaN where not measured.
    """

    request: str
    prompt: str
    completion: str
    label: Label
    reward: float
    advantage: float | None
    num_tokens: int
    finish: Finish
    abs_diff: float


def step_samples(
    groups: Sequence[Group],
    documents: Sequence[Document],
    abs_diffs: Sequence[float],
    decode: Decode,
) -> list[Sample]:
    """Of all completions of a step; `documents` are those that were learnt from, and `abs_diffs`
    the mean differences of each."""
    learnt = {d.rollout.request: (d.advantage, abs_diffs[d.number]) for d in documents}
    return [
        _sample(group, place, learnt.get(rollout.request, (None, math.nan)), decode)
        for group in groups
        for place, rollout in enumerate(group.rollouts)
    ]


def _sample(group: Group, place: int, learnt: tuple[float | None, float], decode: Decode) -> Sample:
    rollout, (advantage, abs_diff) = group.rollouts[place], learnt
    return Sample(
        request=rollout.request,
        prompt=decode(rollout.prompt_ids.tolist()),
        completion=decode(rollout.response_ids.tolist()),
        label=group.prompt.label,
        reward=float(group.rewards[place]),
        advantage=advantage,
        num_tokens=len(rollout.response_ids),
        finish=rollout.finish,
        abs_diff=float(abs_diff),
    )


def samples_file(run_dir: Path, step: int) -> Path:
    """Where the table of `step` is."""
    return run_dir / SAMPLES_FOLDER / f"step-{step:08d}.jsonl"


def write_samples(run_dir: Path, step: int, samples: Sequence[Sample]) -> Path:
    """Writes the table of a step, in place of one that an interrupted run left; returns its path.

    One JSON object in ASCII for each sample, with the fields of `Sample`; NaN and infinities are
    the strings "NaN", "Infinity" and "-Infinity".
    """
    path = samples_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    lines = [json.dumps(_plain(sample), allow_nan=False) + "\n" for sample in samples]
    partial.write_text("".join(lines), encoding="ascii")
    # replacing is atomic: a table is whole or not there
    partial.replace(path)
    return path


def sample_table(step: int, samples: Sequence[Sample]) -> Table:
    """The samples for a terminal, long texts cut in their middle, nothing in them obeyed."""
    table = Table(title=f"samples of step {step}", title_justify="left")
    for name in ("reward", "advantage", "tokens", "finish", "label", "prompt", "completion"):
        table.add_column(name, overflow="fold")
    for sample in samples:
        advantage = "-" if sample.advantage is None else f"{sample.advantage:.3g}"
        texts = (str(sample.label), sample.prompt, sample.completion)
        table.add_row(
            f"{sample.reward:.4g}",
            advantage,
            str(sample.num_tokens),
            sample.finish,
            # no markup is read in a Text
            *(Text(_shortened(printable(text))) for text in texts),
        )
    return table


def pick_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most `count` of them for the screen: spread over the rewards, the best one first."""
    ordered = sorted(samples, key=lambda sample: -sample.reward)
    if count >= len(ordered):
        return ordered
    if count < 2:
        return ordered[:count]
    last = len(ordered) - 1
    return [ordered[round(place * last / (count - 1))] for place in range(count)]


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    half = (SHOWN_CHARS - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def _plain(sample: Sample) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(sample).items()}


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
