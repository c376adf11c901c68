"""Which completions this rank computes together, by a budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.core import parallel_state

from glm5.rl.row import Document, PolicyRow, policy_row
from glm5.runtime.distributed import current_layout
from glm5.train.batches import micro_batches_together, token_multiple
from glm5.train.packing import plan_rows


@dataclass(frozen=True)
class PolicyBatcher:
    """Packs completions into micro-batches of at most `max_tokens`, and shares those out.

    Ranks that exchange tokens need equally long micro-batches: where the model is split they are
    padded to the capacity.
    """

    max_tokens: int
    pad_token_id: int

    @property
    def capacity(self) -> int:
        """Tokens of a padded micro-batch, over all context-parallel ranks."""
        multiple = token_multiple()
        return math.ceil(self.max_tokens / multiple) * multiple

    def share(self, documents: Sequence[Document]) -> list[list[list[Document]]]:
        """The micro-batches of every data-parallel rank: number i goes to rank i mod dp_size.

        Each gets equally many, the last ones without a completion where they do not suffice.
        """
        plan = plan_rows([document.num_tokens for document in documents], self.max_tokens)
        micro_batches = [[documents[index] for index in row] for row in plan]
        ranks = parallel_state.get_data_parallel_world_size()
        missing = -len(micro_batches) % (ranks * micro_batches_together())
        micro_batches += [[] for _ in range(missing)]
        return [micro_batches[rank::ranks] for rank in range(ranks)]

    def row(self, documents: Sequence[Document]) -> PolicyRow:
        """One micro-batch, in the shape that the layout needs."""
        layout = current_layout()
        is_split = layout.splits_model or layout.cp > 1
        return policy_row(documents, self.capacity if is_split else None, self.pad_token_id)


@dataclass(frozen=True)
class StepPlan:
    """Who computes what: the micro-batches of every update, of every data-parallel rank."""

    updates: tuple[list[list[list[Document]]], ...]

    def of_rank(self, data_rank: int) -> list[list[list[Document]]]:
        """The micro-batches of each update that one data-parallel rank computes."""
        return [ranks[data_rank] for ranks in self.updates]

    def numbers(self, data_rank: int) -> list[int]:
        """Of the completions among them."""
        return [
            document.number
            for micro_batches in self.of_rank(data_rank)
            for documents in micro_batches
            for document in documents
        ]


def plan_step(
    batcher: PolicyBatcher, groups: Sequence[Sequence[Document]], updates: int
) -> StepPlan:
    """Shares the groups of a step out to at most `updates` updates, and those to ranks."""
    parts = split_updates(groups, updates)
    return StepPlan(
        tuple(batcher.share([document for group in part for document in group]) for part in parts)
    )


def split_updates[T](items: Sequence[T], count: int) -> list[Sequence[T]]:
    """At most `count` runs of items, in order and as equal as can be; none of them is empty."""
    count = min(count, len(items))
    bounds = [len(items) * part // count for part in range(count + 1)] if count else [0]
    return [items[start:end] for start, end in pairwise(bounds)]
