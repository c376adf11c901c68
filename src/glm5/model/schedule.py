"""Which layers stand on which pipeline stage, and whether IndexShare allows it."""

from __future__ import annotations

from collections.abc import Sequence

from glm5.config import Glm5Config
from glm5.errors import LayoutError


def pipeline_layout(
    glm5: Glm5Config, stages: int, layers_per_stage: Sequence[int] | None, *, mtp: bool
) -> list[list[str]]:
    """Megatron's pipeline_model_parallel_layout: what stands on each stage, in order.

    Without `layers_per_stage` the most even split is taken that IndexShare allows.

    Raises:
        LayoutError: the split does not fit the model, or a stage starts on a shared layer.
    """
    split = list(nearest_split(glm5, stages) if layers_per_stage is None else layers_per_stage)
    if len(split) != stages or sum(split) != glm5.num_hidden_layers or min(split) < 1:
        raise LayoutError(
            "the layers per stage do not fit the model",
            got=split,
            expected=f"{stages} positive numbers that add up to {glm5.num_hidden_layers}",
            remedy=f"use {nearest_split(glm5, stages)}",
        )
    check_stages(glm5, split)
    layout = [["decoder"] * count for count in split]
    layout[0].insert(0, "embedding")
    layout[-1] += ["mtp"] * (glm5.num_nextn_predict_layers if mtp else 0) + ["loss"]
    return layout


def stage_starts(layers_per_stage: Sequence[int]) -> list[int]:
    """First layer of every stage (counted from 0)."""
    starts, start = [], 0
    for count in layers_per_stage:
        starts.append(start)
        start += count
    return starts


def check_stages(glm5: Glm5Config, layers_per_stage: Sequence[int]) -> None:
    """Every stage must start on a "full" layer: a selection does not travel between stages.

    Megatron's pipeline sends one tensor per micro-batch between stages, the hidden states.

    Raises:
        LayoutError: a stage starts on a shared layer; the nearest valid split is named.
    """
    for stage, layer in enumerate(stage_starts(layers_per_stage)):
        if glm5.indexer_types[layer] == "shared":
            source = max(i for i in range(layer) if glm5.indexer_types[i] == "full")
            raise LayoutError(
                f"pipeline stage {stage} starts on layer {layer}, which shares the keys that "
                f"layer {source} selects on another stage",
                got=f"layers per stage {list(layers_per_stage)}",
                expected='every stage starts on a layer whose indexer_types entry is "full"',
                remedy=f"use layers per stage {_nearest(glm5, stage_starts(layers_per_stage))}",
            )


def nearest_split(glm5: Glm5Config, stages: int) -> list[int]:
    """The most even split into `stages` stages that all start on full layers.

    Raises:
        LayoutError: there are fewer full layers than stages.
    """
    total = glm5.num_hidden_layers
    return _nearest(glm5, [stage * total / stages for stage in range(stages)])


def _nearest(glm5: Glm5Config, wanted: Sequence[float]) -> list[int]:
    """The split whose stages start on the full layers next to the `wanted` ones."""
    full = [layer for layer, kind in enumerate(glm5.indexer_types) if kind == "full"]
    if len(full) < len(wanted):
        raise LayoutError(
            "too many pipeline stages",
            got=len(wanted),
            expected=f"at most {len(full)}, the number of layers with an indexer",
            remedy="use fewer stages",
        )
    starts = [0]
    for stage, start in enumerate(wanted[1:], 1):
        rest = len(wanted) - stage - 1
        candidates = [layer for layer in full[: len(full) - rest] if layer > starts[-1]]
        starts.append(min(candidates, key=lambda layer: abs(layer - start)))
    ends = [*starts[1:], glm5.num_hidden_layers]
    return [after - start for start, after in zip(starts, ends, strict=True)]
