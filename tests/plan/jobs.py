"""Dry runs of tiny models, and rules that are wrong; they run in a process of their own."""

import contextlib
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from glm5.checkpoint.convert import EXPERT_BIAS
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.rules import GatedPair, Rename, Rule
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.checkpoint.tiny import tiny_config
from glm5.cli import main
from glm5.config import Glm5Config
from glm5.errors import Glm5Error
from glm5.plan.dry_run import dry_run
from glm5.plan.shards import ShardBuilder, ShardJob
from glm5.runtime.distributed import Layout

O_PROJ = "model.layers.4.self_attn.o_proj.weight"
EXPERT = "model.layers.5.mlp.experts.3.gate_proj.weight"


@dataclass(frozen=True)
class FirstPart(Rename):
    """Every rank gets the first rank's part."""

    def load(self, reader: TensorReader, *, tp_rank: int = 0, **cut: Any) -> Tensor:
        del tp_rank
        return Rename.load(self, reader, tp_rank=0, **cut)


@dataclass(frozen=True)
class ReadTwice(Rename):
    """A source is read a second time."""

    def load(self, reader: TensorReader, **cut: Any) -> Tensor:
        Rename.load(self, reader, **cut)
        return Rename.load(self, reader, **cut)


@dataclass(frozen=True)
class UpFirst(GatedPair):
    """Right shapes, wrong order on the way back."""

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return GatedPair.to_hf(self, tensor)[::-1]


@dataclass(frozen=True)
class Case:
    """One dry run of a tiny model; `wrong` names a class above that replaces the rule of `name`."""

    layout: dict[str, int] = field(default_factory=dict)
    variant: str = "5.2"
    fp8: bool = False
    mtp: bool = False
    split: tuple[int, ...] | None = None
    wrong: str | None = None
    name: str = ""

    def config(self) -> Glm5Config:
        return Glm5Config.from_hf_dict(tiny_config(self.variant, fp8=self.fp8))  # type: ignore[arg-type]

    def rules(self) -> list[Rule]:
        rules = glm5_rules(self.config(), include_mtp=self.mtp)
        return [self._changed(rule) if self.name in rule.hf_names else rule for rule in rules]

    def _changed(self, rule: Rule) -> Rule:
        kinds = {kind.__name__: kind for kind in (FirstPart, ReadTwice, UpFirst)}
        return kinds[str(self.wrong)](*rule.hf_names, rule.mcore_name)


def run_cases(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What each case found, or the error that it raised."""
    return [_run(case) for case in cases]


def _run(case: Case) -> dict[str, Any]:
    try:
        done = dry_run(
            case.config(),
            Layout(**case.layout),
            include_mtp=case.mtp,
            layers_per_stage=case.split,
            rules=case.rules(),
        )
    except Glm5Error as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {
        "shards": done.num_shards,
        "tensors": done.num_tensors,
        "left_out": done.num_left_out,
        "elements": _elements_by_stage(case),
    }


def _elements_by_stage(case: Case) -> list[list[int]]:
    """Of the parameters of every shard; a router's bias is a buffer."""
    job = ShardJob(case.config(), Layout(**case.layout), case.rules(), case.mtp, case.split)
    found: list[list[int]] = [[] for _ in range(job.layout.pp)]
    for shard in ShardBuilder(job).build(range(job.world_size)):
        sizes = [
            math.prod(target.shape)
            for name, target in shard.targets.items()
            if not name.endswith(EXPERT_BIAS)
        ]
        found[shard.at.pp].append(sum(sizes))
    return found


def run_command(arguments: Sequence[str]) -> list[str]:
    """Exit code and standard output of `glm5 plan`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["glm5", "plan", *arguments])
        patch.setenv("COLUMNS", "160")
        try:
            main()
        except SystemExit as end:
            return [str(end.code), printed.getvalue()]
    raise AssertionError("the command did not exit")
