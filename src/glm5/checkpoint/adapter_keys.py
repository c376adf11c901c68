"""What the tensor names of an adapter file mean, whoever wrote it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from glm5.checkpoint.adapter_layout import MLP_TARGETS

PREFIX = "base_model.model."
# The names that engines give the linears of an expert, beside their own.
EXPERT_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
STACKED_NAMES = {linear: alias for alias, linear in EXPERT_ALIASES.items()}

_LORA = re.compile(r"(.+)\.lora_([AB])\.weight")
_FUSED = re.compile(r".+\.mlp\.experts(\.base_layer)?")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)((?:\d+\.)?)(\w+)")


@dataclass(slots=True)
class AdapterKeys:
    """Names in the file by what they hold, "A" and "B" apart.

    linears: by Hugging Face path of one linear. stacked: by `...mlp.experts.<linear>`, all experts
    of a layer in one 3-D tensor. fused: by `...mlp.experts[.base_layer]`, as PEFT keeps them.
    """

    linears: dict[str, dict[str, str]] = field(default_factory=dict)
    stacked: dict[str, dict[str, str]] = field(default_factory=dict)
    fused: dict[str, dict[str, str]] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    """By name without PEFT's prefix: whole modules, factors named twice, or nothing known."""


def sort_keys(names: Iterable[str]) -> AdapterKeys:
    """Sorts names by their form alone; whether the model has such a linear is not asked."""
    keys = AdapterKeys()
    for name in names:
        plain = name.removeprefix(PREFIX)
        match = _LORA.fullmatch(plain)
        if match is None:
            keys.other[plain] = name
            continue
        module, side = match.groups()
        if _FUSED.fullmatch(module):
            kind = keys.fused
        elif expert := _EXPERT.fullmatch(module):
            owner, number, leaf = expert.groups()
            leaf = EXPERT_ALIASES.get(leaf, leaf)
            if not number and leaf not in MLP_TARGETS:
                keys.other[plain] = name
                continue
            kind = keys.linears if number else keys.stacked
            module = owner + number + leaf
        else:
            kind = keys.linears
        sides = kind.setdefault(module, {})
        if side in sides:
            # told by whoever asks what is of no known form
            keys.other[plain] = name
        sides[side] = name
    return keys


def expert_path(stacked: str, expert: int) -> str:
    """`...mlp.experts.gate_proj` -> `...mlp.experts.{expert}.gate_proj`."""
    owner, _, leaf = stacked.rpartition(".")
    assert leaf in MLP_TARGETS, stacked
    return f"{owner}.{expert}.{leaf}"
