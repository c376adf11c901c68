"""How many of a rollout's choices the trainer would have made itself."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.model.replay import Replay, Stream
from glm5.ops.key_sets import rows_per_chunk


class Overlap:
    """Counts, layer by layer, recorded choices and those of them that the trainer's own are among.

    An observer of one or more forwards. Under a replay every layer is asked with the rollout's
    choices above it, so that one difference is not counted again in all layers below; this scores
    all keys, which the replay alone does not. Of the indexers only queries count that see more than
    index_topk keys. Ranks see their own tokens and layers: their counts add up.
    """

    def __init__(self, recorded: Replay, device: torch.device) -> None:
        self.recorded = recorded
        self.counts: dict[Stream, Tensor] = {
            stream: torch.zeros(2, dtype=torch.int64, device=device)
            for stream in ("experts", "topk")
        }
        """[recorded choices, those that the trainer makes too] int64."""

    def see_experts(self, layer: int, tokens: range, experts: Tensor) -> None:
        if self.recorded.experts is None:
            return
        recorded = self.recorded.experts[layer][tokens.start : tokens.stop]
        given = recorded >= 0
        same = (recorded[:, :, None] == experts[:, None, :]).any(2) & given
        self._add("experts", given.sum(), same.sum())

    def see_topk(self, layer: int, queries: range, topk_indices: Tensor) -> None:
        if self.recorded.topk is None:
            return
        layers = self.recorded.topk[layer]
        for places, recorded in layers.recorded(queries, topk_indices.device):
            same = _num_shared(recorded, topk_indices[places])
            self._add("topk", same.new_full((), recorded.numel()), same)

    def _add(self, stream: Stream, recorded: Tensor, same: Tensor) -> None:
        self.counts[stream] += torch.stack([recorded, same])


def _num_shared(a: Tensor, b: Tensor) -> Tensor:
    """Over all rows, the keys that a [n, topk] has in common with b [n, topk]; both ascending.

    -1 may stand at the tail of b.
    """
    total = a.new_zeros((), dtype=torch.int64)
    # a search makes an int64 place for each key
    size = rows_per_chunk(32 * a.shape[1])
    for some, others in zip(a.split(size), b.split(size), strict=True):
        # behind every key, so that the row stays ascending
        ascending = others.masked_fill(others < 0, torch.iinfo(others.dtype).max)
        places = torch.searchsorted(ascending, some).clamp_(max=others.shape[1] - 1)
        total += (ascending.gather(1, places) == some).sum()
    return total
