"""Memory of every rank of a layout: weights, gradients, optimiser, activations, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import repeat

from glm5.config import Glm5Config
from glm5.model.schedule import stage_starts
from glm5.plan import activations as act
from glm5.plan import weights as w
from glm5.plan.layouts import Placement
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout

# AdamW in mixed precision: fp32 gradients; an fp32 copy and two moments; and, while it steps, the
# root of the second moment of every weight at once.
GRADIENT_BYTES, OPTIMIZER_BYTES, STEP_BYTES = 4, 12, 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU; all but `transient` are there at the fullest moment."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept from forward to backward passes, of all micro-batches in flight."""
    buffers: int
    """Of the collectives."""
    transient: int
    """The larger of a layer's or the loss's fullest moment, and the optimiser's step."""

    @property
    def peak(self) -> int:
        """torch.cuda.max_memory_allocated of a step."""
        return sum(getattr(self, field.name) for field in fields(self))


Kind = tuple[bool, bool]  # whether a layer has an indexer, and whether it has experts


@dataclass(frozen=True)
class Stage:
    """The decoder layers of one pipeline rank, by interleaved stage, and what else stands there."""

    chunks: tuple[tuple[Kind, ...], ...]
    first: bool
    last: bool

    @property
    def layers(self) -> tuple[Kind, ...]:
        """Of all chunks."""
        return sum(self.chunks, ())

    @property
    def kinds(self) -> Counter[Kind]:
        """How many layers there are of each kind; layers of a kind are alike."""
        return Counter(self.layers)


def stages_of(c: Glm5Config, layers_per_stage: Sequence[int], pp: int) -> list[Stage]:
    """What each of pp ranks has of a split into pp * vpp stages: stage i is rank (i mod pp)'s."""
    kinds = [
        (indexer == "full", mlp == "sparse")
        for indexer, mlp in zip(c.indexer_types, c.mlp_layer_types, strict=True)
    ]
    starts = stage_starts(layers_per_stage)
    chunks = [
        tuple(kinds[start : start + count])
        for start, count in zip(starts, layers_per_stage, strict=True)
    ]
    return [Stage(tuple(chunks[rank::pp]), rank == 0, rank == pp - 1) for rank in range(pp)]


def stage_elements(c: Glm5Config, stage: Stage, layout: Layout, work: Workload) -> w.Elements:
    """Weights of a rank of the stage."""
    found = w.NOTHING
    if stage.first:
        found += w.elements(w.embedding_weights(c), layout, work)
    for (full, sparse), count in stage.kinds.items():
        layer = w.layer_weights(c, full=full, sparse=sparse)
        found += w.elements(layer, layout, work).times(count)
    if stage.last:
        found += w.elements(w.head_weights(c), layout, work)
    return found


def stage_memory(
    c: Glm5Config, stage: Stage, place: Placement, work: Workload, *, in_flight: int
) -> Memory:
    """Of a rank of the stage, with `in_flight` chunks between their forward and backward pass."""
    layout = place.layout
    held = stage_elements(c, stage, layout, work)
    s = act.shapes(c, layout, work)
    selections = sum(full for full, _ in stage.layers) * act.selection_bytes(c, s)
    of_all_chunks = (
        sum(_kept(layer, work) for layer in _layers(c, stage, layout, work)) + selections
    )
    kept = of_all_chunks * in_flight // len(stage.chunks)
    dense, experts = _optimizer_elements(held, place)
    return Memory(
        weights=held.num_bytes,
        gradients=GRADIENT_BYTES * held.trained,
        optimizer=OPTIMIZER_BYTES * (dense + experts),
        activations=kept,
        buffers=act.buffer_bytes(c, s, layout),
        transient=max(moments(c, stage, place, work, kept=kept).values()),
    )


def moments(
    c: Glm5Config, stage: Stage, place: Placement, work: Workload, *, kept: int
) -> dict[str, int]:
    """Bytes of the moments that may be the fullest, beside `kept` activations and all that stays:
    of a layer, of the loss, and of the optimiser's step."""
    layout = place.layout
    held = stage_elements(c, stage, layout, work)
    # a weight's gradient exists in bf16 before it is added to the fp32 one
    gradient = act.BF16 * max(
        w.elements(w.layer_weights(c, full=full, sparse=sparse), layout, work).largest
        for full, sparse in stage.kinds
    )
    if not stage.last and work.mode == "full":
        gradient = act.BF16 * held.largest
    dense, experts = _optimizer_elements(held, place)
    together = dense + experts if layout.ep * layout.etp == 1 else max(dense, experts)
    found = {
        "layer": max(_fullest(layer, work) for layer in _layers(c, stage, layout, work)) + gradient,
        # no activation is left when the optimiser steps
        "optimizer step": max(0, STEP_BYTES * together - kept),
    }
    if stage.last:
        found["logits"] = act.head_bytes(c, act.shapes(c, layout, work), layout, work)
    return found


def _layers(
    c: Glm5Config, stage: Stage, layout: Layout, work: Workload
) -> Iterator[act.LayerBytes]:
    """One for each decoder layer."""
    s = act.shapes(c, layout, work)
    for (full, sparse), count in stage.kinds.items():
        layer = act.layer_bytes(c, s, layout, work, full=full, sparse=sparse)
        yield from repeat(layer, count)


def _optimizer_elements(held: w.Elements, place: Placement) -> tuple[int, int]:
    """(outside the routed experts, theirs) that a rank's optimiser has.

    Ranks with the same weights share it; experts that are shared out have their own.
    """
    return (held.trained - held.experts) // place.copies, held.experts // place.expert_copies


def _kept(layer: act.LayerBytes, work: Workload) -> int:
    """Until the backward pass."""
    if work.recompute == "full":
        return layer.entry
    return layer.kept - (_dropped(layer) if work.recompute == "selective" else 0)


def _fullest(layer: act.LayerBytes, work: Workload) -> int:
    """Beside what is kept: what is recomputed lives here."""
    if work.recompute == "full":
        return layer.kept + layer.passing
    if work.recompute == "selective":
        return layer.kept_mlp + layer.passing
    return layer.passing


def _dropped(layer: act.LayerBytes) -> int:
    return layer.kept_core + layer.kept_mlp
