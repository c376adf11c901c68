"""Trains one rank's share for a few steps and notes bytes, seconds and collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from glm5.config import Glm5Config
from glm5.model.grouped_experts import GroupedExperts
from glm5.node_share.meter import Meter, metered
from glm5.node_share.training import adapt, random_model, step_taker, trained
from glm5.plan.activations import shapes
from glm5.plan.hardware import GIB
from glm5.plan.layouts import Placement
from glm5.plan.workload import Workload
from glm5.runtime.simulated import simulated_rank
from glm5.runtime.watched import Call, Traffic
from glm5.train.state import TrainState

WARM_UP_STEPS = 2

# Parts of a model by what stands in their parameters' paths; the first one counts.
_PARTS = (
    ("adapters", r"\.pairs\."),
    ("embeddings and head", r"word_embeddings|output_layer"),
    ("routed experts", r"\.mlp\.experts\."),
    ("routers", r"\.mlp\.router\."),
    ("dense and shared MLPs", r"\.mlp\."),
    ("indexers", r"\.indexer\."),
    ("attention", r"\.self_attention\."),
    ("norms", ""),
)


@dataclass(frozen=True)
class Share:
    """Which rank of which layout trains what."""

    config: Glm5Config
    place: Placement
    rank: int
    work: Workload
    document_tokens: int
    steps: int
    fp8_compute: bool = False

    @property
    def balanced_rows(self) -> int:
        """What each layer's experts of a rank get, if all experts are equally liked."""
        return shapes(self.config, self.place.layout, self.work).routed

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together: one row per data-parallel rank."""
        return self.place.dp * self.work.seq_len


@dataclass(frozen=True)
class Step:
    """One step of the trainer."""

    loss: float
    seconds: float
    copy_seconds: float
    """Of these, in the stand-ins of the collectives."""
    calls: list[Call]

    @property
    def own_seconds(self) -> float:
        """Without communication."""
        return self.seconds - self.copy_seconds


@dataclass
class Measured:
    """What a share took, as far as it came."""

    weights: dict[str, int] = field(default_factory=dict)
    """Bytes of parameters and buffers, by part of the model."""
    gradients: int = 0
    optimizer: int = 0
    stays: int = 0
    """Bytes between steps: all the above, and what little else there is."""
    peak: int = 0
    reserved: int = 0
    outside: int = 0
    routed_rows: list[int] = field(default_factory=list)
    """Rows that the experts of each layer got in each of its forward passes."""
    steps: list[Step] = field(default_factory=list)
    out_of_memory: str = ""
    """What the allocator said, where the share did not fit."""

    @property
    def passing(self) -> int:
        """Bytes of the fullest moment beside what stays."""
        return max(0, self.peak - self.stays)

    @property
    def is_timed(self) -> bool:
        """Whether it came past the warm-up."""
        return len(self.steps) > WARM_UP_STEPS

    @property
    def step(self) -> Step:
        """The median of the steps after the warm-up."""
        timed = self.steps[WARM_UP_STEPS:]
        middle = median(step.own_seconds for step in timed)
        return min(timed, key=lambda step: abs(step.own_seconds - middle))


def measure_share(
    share: Share,
    device: torch.device,
    *,
    limit_gib: float,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Builds the share with random weights and takes its steps, with room for so many GiB.

    Raises:
        LayoutError: this process belongs to a group already, or the layout does not divide it.
    """
    place, found = share.place, Measured()
    with (
        simulated_rank(share.rank, place.gpus, place.layout, device) as traffic,
        metered(device, limit_gib * GIB) as meter,
    ):
        try:
            _train(share, device, traffic, meter, found, say)
        except torch.OutOfMemoryError as error:
            found.out_of_memory = str(error).partition("\n")[0]
        found.peak, found.reserved, found.outside = meter.peak, meter.reserved, meter.outside
    return found


def _train(
    share: Share,
    device: torch.device,
    traffic: Traffic,
    meter: Meter,
    found: Measured,
    say: Callable[[str], None],
) -> None:
    work = share.work
    model = random_model(share.config, work, device, fp8_compute=share.fp8_compute)
    found.weights = weight_bytes(model)
    say(f"the base takes {sum(found.weights.values()) / GIB:.2f} GiB")
    _note_rows(model, found.routed_rows)
    adapt(model, work)
    found.weights = weight_bytes(model)
    before = meter.live
    state = trained(model, share.steps)
    found.gradients = sum(buffer.grad_data.nbytes for buffer in _buffers(state))
    found.stays = meter.live
    loop = step_taker(state, work, share.document_tokens, share.steps)
    traffic.take()
    for number in range(1, share.steps + 1):
        values = loop.take(number)
        calls = traffic.take()
        copies = sum(call.seconds for call in calls)
        found.steps.append(Step(values["loss"], values["step_seconds"], copies, calls))
        say(f"step {number}: loss {values['loss']:.3f}, {values['step_seconds']:.2f} s")
        found.stays = meter.live
        found.optimizer = found.stays - before - found.gradients


def _buffers(state: TrainState) -> Iterator[Any]:
    """Megatron's buffers of gradients."""
    for chunk in state.chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _note_rows(model: nn.Module, rows: list[int]) -> None:
    def note(experts: nn.Module, arguments: tuple[Any, ...]) -> None:
        del experts
        rows.append(len(arguments[0]))

    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.register_forward_pre_hook(note)


def weight_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers by part of the model; parts without any are left out."""
    found: Counter[str] = Counter()
    for tensors in (model.named_parameters(), model.named_buffers()):
        for path, tensor in tensors:
            found[_part(path)] += tensor.nbytes
    return {name: found[name] for name, _ in _PARTS if found[name]}


def _part(path: str) -> str:
    return next(name for name, pattern in _PARTS if re.search(pattern, path))


def calls_by_kind(calls: Sequence[Call]) -> dict[tuple[str, str], list[Call]]:
    """Grouped by (operation, axis), in the order in which kinds come first."""
    found: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        found.setdefault((call.op, call.axis), []).append(call)
    return found
