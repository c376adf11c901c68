"""Which documents attend densely: those of at most topk tokens select every key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Consecutive documents that attend in the same way, by their lengths in tokens."""

    dense: bool
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Routes:
    """How the queries of a micro-batch attend; known to the host, so that no layer waits."""

    runs: tuple[Run, ...]

    @classmethod
    def by_length(cls, documents: Iterable[int], topk: int) -> Routes:
        """Dense where a document has at most topk tokens; empty documents are passed over."""
        lengths = [length for length in documents if length > 0]
        grouped = groupby(lengths, lambda length: length <= topk)
        return cls(tuple(Run(dense, tuple(run)) for dense, run in grouped))

    @classmethod
    def all_sparse(cls, num_tokens: int) -> Routes:
        """For documents whose lengths are not known."""
        return cls((Run(False, (num_tokens,)),))

    @property
    def dense_lengths(self) -> tuple[int, ...]:
        """Of the documents that attend densely."""
        return tuple(length for run in self.runs if run.dense for length in run.lengths)

    @property
    def num_sparse(self) -> int:
        """Queries that need a selection."""
        return sum(run.num_tokens for run in self.runs if not run.dense)

    def of_rank(self, rank: int, size: int) -> Routes:
        """Of the queries rank, rank + size, ...: how many of each run they are."""
        runs, start = [], 0
        for run in self.runs:
            end = start + run.num_tokens
            first = start + (rank - start) % size
            runs.append(Run(run.dense, (len(range(first, end, size)),)))
            start = end
        return Routes(tuple(runs))

    def take(self, x: Tensor, *, dense: bool) -> Tensor:
        """x [t, ...] -> its rows that attend in that way; a view where they are neighbours."""
        parts = x.split([run.num_tokens for run in self.runs])
        taken = [part for part, run in zip(parts, self.runs, strict=True) if run.dense == dense]
        if len(taken) == 1:
            return taken[0]
        return torch.cat(taken) if taken else x[:0]

    def join(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Undoes `take`: the rows of both kinds -> [t, ...]."""
        if len(self.runs) == 1:
            return dense if self.runs[0].dense else sparse
        kinds = {
            kind: iter(x.split([run.num_tokens for run in self.runs if run.dense == kind]))
            for kind, x in ((True, dense), (False, sparse))
        }
        return torch.cat([next(kinds[run.dense]) for run in self.runs])
