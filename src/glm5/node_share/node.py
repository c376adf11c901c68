"""From one rank's figures to the node's: what its links take, and tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm5.node_share.measure import Measured, Share, calls_by_kind
from glm5.plan import hardware as hw
from glm5.plan.memory import Memory, Stage, moments, stage_memory, stages_of
from glm5.runtime.watched import Call


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in a step."""

    op: str
    axis: str
    num_calls: int
    num_bytes: int
    copy_seconds: float
    """What the stand-ins took."""
    link_seconds: float
    """What NVLink would take; of this nothing is hidden."""


@dataclass(frozen=True)
class Prediction:
    """The planner's view of the same rank."""

    memory: Memory
    moments: dict[str, int]
    """Bytes of the moments that may be the fullest."""


def collectives(calls: Sequence[Call]) -> list[Collective]:
    """One for each kind of call."""
    return [
        Collective(
            op,
            axis,
            len(found),
            sum(call.num_bytes for call in found),
            sum(call.seconds for call in found),
            sum(link_seconds(call.num_bytes) for call in found),
        )
        for (op, axis), found in calls_by_kind(calls).items()
    ]


def link_seconds(num_bytes: int) -> float:
    """Of one collective that moves so many bytes over a GPU's link, within a node."""
    return hw.COLLECTIVE_START_S + num_bytes / (hw.NVLINK_BYTES_PER_S * hw.NVLINK_SHARE)


def exchange_seconds(calls: Sequence[Call]) -> float:
    """What NVLink would take for all of them, one after the other."""
    return sum(kind.link_seconds for kind in collectives(calls))


def predict(share: Share) -> Prediction:
    """What the planner says of a layout with a single pipeline stage."""
    (stage,) = stages_of(share.config, share.place.layers_per_stage, 1)
    memory = stage_memory(share.config, stage, share.place, share.work, in_flight=1)
    return Prediction(memory, _moments(share, stage, memory))


def tokens_per_second(share: Share, measured: Measured) -> float:
    """Of the node, if every rank takes as long as this one and no collective is hidden."""
    step = measured.step
    return share.tokens_per_step / (step.own_seconds + exchange_seconds(step.calls))


def _moments(share: Share, stage: Stage, memory: Memory) -> dict[str, int]:
    return moments(share.config, stage, share.place, share.work, kept=memory.activations)
