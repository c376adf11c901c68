"""In which steps a model's tensors are converted, the same on every rank; no Megatron."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from glm5.checkpoint.rules import Rule

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
# How Megatron-Bridge names an expert's weight of a layer whose experts are computed together.
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


@dataclass(frozen=True)
class Step:
    """Tensors that are converted together: one, or the same expert of every expert-parallel rank.

    `rules` has one rule, or one for each of those ranks, in order.
    """

    rules: tuple[Rule, ...]

    @property
    def hf_names(self) -> list[str]:
        """The Hugging Face tensors of the step."""
        return [name for rule in self.rules for name in rule.hf_names]

    def rule_of(self, ep_rank: int) -> Rule:
        """The rule of the tensor that this expert-parallel rank has."""
        return self.rules[ep_rank if len(self.rules) > 1 else 0]


def conversion_steps(rules: Iterable[Rule], num_experts: int, ep_size: int) -> list[Step]:
    """Every rule is in one step.

    An expert's step starts with its rule on the first rank; rank r has that of the expert whose
    number is r * num_experts / ep_size higher.
    """
    by_name = {rule.mcore_name: rule for rule in rules}
    local = num_experts // ep_size
    steps = []
    for name, rule in by_name.items():
        found = _EXPERT.search(name)
        if found is None:
            steps.append(Step((rule,)))
        elif (expert := int(found[1])) < local:
            ranks = (expert + rank * local for rank in range(ep_size))
            steps.append(Step(tuple(by_name[_with_expert(name, e)] for e in ranks)))
    return steps


def grouped_name(name: str) -> str:
    """`...experts.local_experts.3.linear_fc1.weight` -> `...experts.linear_fc1.weight3`."""
    return _EXPERT.sub(r".\2.weight\1", name)


def expert_rule_name(name: str) -> str:
    """Undoes `grouped_name`; other names stay as they are."""
    return _GROUPED.sub(r".experts.local_experts.\2.\1.weight", name)


def _with_expert(name: str, expert: int) -> str:
    return _EXPERT.sub(rf".local_experts.{expert}.\2.weight", name)
