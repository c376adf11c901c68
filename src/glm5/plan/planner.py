"""Memory and speed of layouts, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm5.config import Glm5Config
from glm5.plan.arithmetic import Seconds, stage_seconds, tokens_per_second
from glm5.plan.hardware import FRAGMENTATION, GIB, OUTSIDE_ALLOCATOR_BYTES
from glm5.plan.layouts import Placement, valid_placements
from glm5.plan.memory import Memory, Stage, stage_memory, stages_of
from glm5.plan.workload import RECOMPUTES, Workload


@dataclass(frozen=True)
class StageFigures:
    """One pipeline stage's rank."""

    stage: Stage
    memory: Memory
    seconds: Seconds
    """Of one micro-batch, at least."""


@dataclass(frozen=True)
class Candidate:
    """A layout with a recompute setting, and what it comes to."""

    place: Placement
    work: Workload
    stages: tuple[StageFigures, ...]
    tokens_per_second: float
    """Of all GPUs together, at most."""

    @property
    def peak(self) -> int:
        """Bytes of tensors on the fullest GPU."""
        return max(figures.memory.peak for figures in self.stages)

    @property
    def needed(self) -> float:
        """Bytes that the fullest GPU must have."""
        return needed_bytes(self.peak)

    def fits(self, gpu_memory_gib: float) -> bool:
        """Whether every GPU has room."""
        return self.needed <= gpu_memory_gib * GIB


def needed_bytes(peak: int) -> float:
    """Of the device, for so many bytes of tensors."""
    return peak * FRAGMENTATION + OUTSIDE_ALLOCATOR_BYTES


def evaluate(glm5: Glm5Config, place: Placement, work: Workload) -> Candidate:
    """One layout with the workload's recompute setting."""
    stages = stages_of(glm5, place.layers_per_stage, place.layout.pp)
    figures = tuple(
        StageFigures(
            stage,
            stage_memory(glm5, stage, place, work, in_flight=place.in_flight(rank)),
            stage_seconds(glm5, stage, place, work),
        )
        for rank, stage in enumerate(stages)
    )
    return Candidate(place, work, figures, tokens_per_second(glm5, stages, place, work))


def best_recompute(
    glm5: Glm5Config, place: Placement, work: Workload, gpu_memory_gib: float
) -> Candidate:
    """The layout with the least recompute that fits; with full recompute where nothing does."""
    found = None
    for recompute in RECOMPUTES:
        found = evaluate(glm5, place, replace(work, recompute=recompute))
        if found.fits(gpu_memory_gib):
            break
    assert found is not None
    return found


def candidates(
    glm5: Glm5Config, gpus: int, work: Workload, gpu_memory_gib: float
) -> list[Candidate]:
    """Every valid layout of so many GPUs: those that fit first, then the fastest."""
    found = [
        best_recompute(glm5, place, work, gpu_memory_gib) for place in valid_placements(glm5, gpus)
    ]
    return sorted(found, key=lambda c: (not c.fits(gpu_memory_gib), -c.tokens_per_second))


def best(found: Sequence[Candidate], gpu_memory_gib: float) -> Candidate | None:
    """The fastest that fits."""
    return next((candidate for candidate in found if candidate.fits(gpu_memory_gib)), None)
