"""The discrete choices of one rollout, validated and packed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedExperts:
    """Experts that the routers chose."""


@dataclass(frozen=True)
class PackedTopk:
    """Keys that the indexers chose."""


@dataclass(frozen=True)
class Choices:
    """What a rollout recorded; None where it did not."""

    experts: PackedExperts | None
    topk: PackedTopk | None
