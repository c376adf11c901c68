"""Attention by tokens: which queries a tensor-parallel rank attends for, and how they get there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from glm5.model.routes import Routes


@dataclass(frozen=True)
class QueryShares:
    """Rank r of the tensor-parallel ranks has the queries r, r + tp, r + 2 tp, ... of a row.

    Later queries of a document have more keys to score, and so every rank has as many of each. Of
    those that attend densely nothing travels. x [n, h / tp, d] are the n sparse queries of a row
    and this rank's heads, [n_r, h, d] all heads of those of the n that are rank r's.
    """

    routes: Routes
    """Of all queries of the row, of which there are a multiple of tp."""
    device: torch.device

    @cached_property
    def group(self) -> Any:
        return parallel_state.get_tensor_model_parallel_group()

    @cached_property
    def own_routes(self) -> Routes:
        """Of this rank's queries."""
        return self.routes.of_rank(self.group.rank(), self.group.size())

    @cached_property
    def counts(self) -> list[int]:
        """n_r of every rank."""
        size = self.group.size()
        return [self.routes.of_rank(rank, size).num_sparse for rank in range(size)]

    @cached_property
    def order(self) -> Tensor:
        """[n] int64: the rows of rank 0, then those of rank 1, ..., each in the row's order."""
        rows, start = [], 0
        for run in self.routes.runs:
            if not run.dense:
                rows.append(torch.arange(start, start + run.num_tokens, device=self.device))
            start += run.num_tokens
        return torch.argsort(torch.cat(rows) % self.group.size(), stable=True)

    def by_rank(self, x: Tensor) -> Tensor:
        """x [n, ...] in the row's order -> first the rows of rank 0, then those of rank 1, ..."""
        if self.routes.dense_lengths:
            return x.index_select(0, self.order)
        return x.unflatten(0, (-1, self.group.size())).transpose(0, 1).flatten(0, 1)

    def in_order(self, x: Tensor) -> Tensor:
        """Undoes `by_rank`."""
        if self.routes.dense_lengths:
            return x.index_select(0, torch.argsort(self.order))
        return x.unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(0, 1)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """x [n, h / tp, d], rows `by_rank` -> [n_r, h, d] of this rank's queries."""
        own = self.counts[self.group.rank()]
        received = all_to_all(self.group, x, [own] * self.group.size(), self.counts)
        return received.unflatten(0, (self.group.size(), own)).transpose(0, 1).flatten(1, 2)

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """Undoes `heads_to_tokens`: x [n_r, h, d] -> [n, h / tp, d], rows `by_rank`."""
        parts = x.unflatten(1, (self.group.size(), -1)).transpose(0, 1).flatten(0, 1)
        return all_to_all(self.group, parts, self.counts, [len(x)] * self.group.size())
