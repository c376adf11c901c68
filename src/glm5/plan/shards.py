"""Builds every distinct shard of a layout on the meta device and notes what it reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from glm5.checkpoint.convert import fill_targets, mcore_tensors, partition_dim
from glm5.checkpoint.rules import Rule
from glm5.config import Glm5Config
from glm5.model.build import build_chunks
from glm5.model.transformer_config import (
    Glm5TransformerConfig,
    glm5_transformer_config,
    torch_dtype,
)
from glm5.plan.published import Part, open_published
from glm5.runtime.distributed import Layout, current_layout
from glm5.runtime.simulated import simulated_rank


@dataclass(frozen=True, order=True, slots=True)
class Coordinates:
    """What tells one shard from another; data and context parallelism only repeat it."""

    pp: int
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of a shard: its shape, and the dimension along which it is cut, if any."""

    shape: tuple[int, ...]
    dim: int | None


@dataclass(frozen=True)
class Shard:
    """What one rank holds (by global Megatron name) and read (by Hugging Face name, in order)."""

    at: Coordinates
    targets: dict[str, Target]
    reads: list[tuple[str, Part]]


@dataclass(frozen=True)
class ShardJob:
    """The model to cut; `rules` are those of the whole model."""

    config: Glm5Config
    layout: Layout
    rules: Sequence[Rule]
    include_mtp: bool = False
    layers_per_stage: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """The smallest world that has every shard."""
        return self.layout.pp * math.lcm(self.layout.tp, self.layout.ep * self.layout.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Of a rank of that world, in Megatron's order: tp first, pp last."""
        layout = self.layout
        per_stage = self.world_size // layout.pp
        return Coordinates(
            pp=rank // per_stage,
            tp=rank % layout.tp,
            ep=rank // layout.etp % layout.ep,
            etp=rank % layout.etp,
        )


class ShardBuilder:
    """Builds shards of one job, one in memory at a time."""

    def __init__(self, job: ShardJob) -> None:
        self.job = job
        # once: an FP8 release has 118,629 tensors to look at
        self.published, self.reader = open_published(job.config)

    def build(self, ranks: Iterable[int]) -> Iterator[Shard]:
        """The shards of these ranks."""
        return map(self._build, ranks)

    def _build(self, rank: int) -> Shard:
        job = self.job
        self.published.reads.clear()
        with simulated_rank(rank, job.world_size, _without_repeats(job.layout)):
            at = _coordinates()
            assert at == job.coordinates(rank), f"rank {rank} stands at {at}"
            chunks = build_chunks(_model_config(job))
            tensors = {n: tensor for chunk in chunks for n, tensor in mcore_tensors(chunk).items()}
            fill_targets(tensors, job.rules, self.reader)
        targets = {name: _target(tensor) for name, tensor in tensors.items()}
        return Shard(at, targets, list(self.published.reads))


def _model_config(job: ShardJob) -> Glm5TransformerConfig:
    """As training's, but for the device; attention is never run, so any backend will do."""
    return glm5_transformer_config(
        job.config,
        device=torch.device("meta"),
        dtype=torch_dtype(job.config.dtype),
        backend="torch",
        layout=current_layout(),
        include_mtp=job.include_mtp,
        layers_per_stage=job.layers_per_stage,
    )


def _without_repeats(layout: Layout) -> Layout:
    """Context-parallel ranks hold the same shard, so the smallest world has none."""
    return replace(layout, cp=1)


def _coordinates() -> Coordinates:
    return Coordinates(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


def _target(tensor: Tensor) -> Target:
    return Target(tuple(tensor.shape), partition_dim(tensor))
