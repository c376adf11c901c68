"""Observes both sides so that a tie broken differently does not look like another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.parity.compare import Selection, compare_selections
from glm5.parity.hf_side import observe_hf
from glm5.parity.mcore_side import observe_mcore
from glm5.parity.observation import Observation, block_mask


@dataclass(frozen=True)
class Pair:
    """Both sides on the same tokens, and how their selections differ per full layer."""

    ours: Observation
    theirs: Observation
    selections: list[Selection]

    @property
    def wrong_rows(self) -> int:
        """Queries whose selection rounding cannot explain."""
        return sum(selection.wrong_rows for selection in self.selections)

    @property
    def tied_rows(self) -> int:
        """Queries whose selection differs by a tie."""
        return sum(selection.different_rows for selection in self.selections) - self.wrong_rows


def observe_pair(
    model: GPTModel,
    reference: Any,
    token_ids: Tensor,
    lengths: Sequence[int],
    *,
    batched: bool = False,
    gradients: bool = True,
) -> Pair:
    """Runs glm5, then `transformers` with our selection forced on every layer.

    Forced, each of its indexers sees what ours saw, so its own choice can be judged layer by layer:
    a tie that is broken the other way changes nothing below it. Where a choice is wrong by more
    than a tie, or keys are chosen that a query may not see, `transformers` runs by itself, so that
    the fault shows in everything it reaches.
    """
    ours = observe_mcore(model, token_ids, lengths, batched=batched, gradients=gradients)
    forced = ours.selected if _sees_its_own(ours, lengths) else None
    theirs = observe_hf(reference, token_ids, lengths, selected=forced, gradients=gradients)
    pair = Pair(ours, theirs, compare_selections(ours, theirs, lengths))
    if not pair.wrong_rows or forced is None:
        return pair
    theirs = observe_hf(reference, token_ids, lengths, gradients=gradients)
    return Pair(ours, theirs, pair.selections)


def _sees_its_own(ours: Observation, lengths: Sequence[int]) -> bool:
    """Whether every selected key is one that its query may see."""
    visible = block_mask(lengths, ours.logits.device)
    return all(
        bool((visible.gather(1, indices.clamp_min(0).long()) | (indices < 0)).all())
        for indices in ours.selected.values()
    )
