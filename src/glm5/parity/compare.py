"""Turns two observations into findings with a limit each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.parity.observation import Observation, block_mask

# Errors are relative to the largest reference value: fp32 through tens of layers stays far below.
LIMIT = 1e-4
# A gradient that is 0 in exact arithmetic is rounding of the others: it has no scale of its own.
GRADIENT_FLOOR = 1e-2


class Bounded:
    """Of a dataclass: an error that must not pass a limit."""

    error: float
    limit: float | None
    """None: the error is told and not judged."""

    @property
    def ok(self) -> bool:
        # a NaN error compares false, so it fails
        return self.limit is None or self.error <= self.limit

    def as_dict(self) -> dict[str, object]:
        """The fields, and whether the error is within its limit."""
        return {**vars(self), "ok": self.ok}


@dataclass(frozen=True)
class Finding(Bounded):
    """One compared quantity of one case, at its worst layer or tensor."""

    case: str
    quantity: str
    worst: str
    error: float
    limit: float | None


def relative_error(got: Tensor, reference: Tensor, *, floor: float = 0.0) -> float:
    """max |got - reference| / max(max |reference|, floor); NaN or infinity when a side has one."""
    if got.numel() == 0:
        return 0.0
    scale = reference.abs().max().clamp_min(max(floor, torch.finfo(torch.float32).tiny))
    return float((got - reference).abs().max() / scale)


def gradient_errors(ours: Observation, reference: Observation) -> dict[str, float]:
    """By weight; the scale is at least GRADIENT_FLOOR of the largest gradient of the model."""
    largest = max((float(g.abs().max()) for g in reference.gradients.values()), default=0.0)

    def error(got: Tensor, expected: Tensor) -> float:
        return relative_error(got, expected, floor=GRADIENT_FLOOR * largest)

    return _layerwise(ours.gradients, reference.gradients, error)


def compare(
    case: str, ours: Observation, reference: Observation, lengths: Sequence[int]
) -> list[Finding]:
    """All findings of one case; scores are compared where a query may look."""
    visible = block_mask(lengths, ours.logits.device)
    return [
        Finding(case, "logits", "-", relative_error(ours.logits, reference.logits), LIMIT),
        _worst(case, "hidden states", _layerwise(ours.hidden, reference.hidden, relative_error)),
        _worst(
            case,
            "indexer scores",
            _layerwise(
                ours.scores,
                reference.scores,
                lambda a, b: relative_error(a[visible], b[visible]),
            ),
        ),
        _worst(case, "gradients", gradient_errors(ours, reference)),
    ]


@dataclass(frozen=True)
class Selection:
    """Rows whose selections differ at all, and those where rounding cannot explain it."""

    layer: int
    different_rows: int
    wrong_rows: int


def compare_selections(
    ours: Observation, reference: Observation, lengths: Sequence[int]
) -> list[Selection]:
    """Per full layer; rounding explains a key whose score is that close to the k-th."""
    visible = block_mask(lengths, ours.logits.device)
    if ours.selected.keys() != reference.selected.keys():
        full = sorted(ours.selected.keys() ^ reference.selected.keys())
        return [Selection(layer, len(visible), len(visible)) for layer in full]
    return [_compare_layer(layer, ours, reference, visible) for layer in sorted(reference.selected)]


def _compare_layer(
    layer: int, ours: Observation, reference: Observation, visible: Tensor
) -> Selection:
    scores = reference.scores[layer].masked_fill(~visible, float("-inf"))
    mine = _as_mask(ours.selected[layer], visible)
    theirs = _as_mask(reference.selected[layer], visible)
    differs = mine ^ theirs
    rounding = (ours.scores[layer] - reference.scores[layer])[visible].abs().max()
    # scores that are wrong must not pass for rounding, and so explain the picks they cause
    rounding = rounding.clamp_max(LIMIT * float(reference.scores[layer][visible].abs().max()))
    kth = scores.masked_fill(~theirs, float("inf")).amin(1, keepdim=True)
    explained = (scores - kth).abs() <= 2 * rounding
    # both sides must also pick as many keys
    wrong = (differs & ~explained).any(1) | (mine.sum(1) != theirs.sum(1))
    return Selection(layer, int(differs.any(1).sum()), int(wrong.sum()))


def _as_mask(indices: Tensor, visible: Tensor) -> Tensor:
    """[t, t] bool of the visible keys that are selected."""
    mask = torch.zeros(visible.shape[0], visible.shape[1] + 1, dtype=torch.bool)
    mask = mask.to(visible.device)
    columns = torch.where(indices < 0, visible.shape[1], indices).long()
    mask.scatter_(1, columns, True)
    return mask[:, :-1] & visible


def _layerwise[K](
    ours: dict[K, Tensor], reference: dict[K, Tensor], error: Callable[[Tensor, Tensor], float]
) -> dict[K, float]:
    """Error by key; a key that only one side has is infinitely wrong."""
    errors = {}
    for key in reference.keys() | ours.keys():
        both = key in ours and key in reference
        errors[key] = error(ours[key], reference[key]) if both else float("inf")
    return errors


def _worst[K](case: str, quantity: str, errors: dict[K, float]) -> Finding:
    def badness(key: K) -> float:
        return float("inf") if errors[key] != errors[key] else errors[key]

    if not errors:
        return Finding(case, quantity, "-", 0.0, LIMIT)
    worst = max(errors, key=badness)
    name = f"layer {worst}" if isinstance(worst, int) else str(worst)
    return Finding(case, quantity, name, errors[worst], LIMIT)
