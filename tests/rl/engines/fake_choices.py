"""Stands in for the packed records where they do not exist yet: keeps what it is given."""

from types import ModuleType
from typing import Any


class _Shape:
    @classmethod
    def from_config(cls, glm5: Any) -> "_Shape":
        return cls()


def install(choices: ModuleType) -> None:
    choices.ChoiceShape = _Shape
    choices.pack_topk = choices.pack_experts = lambda record, shape, *, request: record
