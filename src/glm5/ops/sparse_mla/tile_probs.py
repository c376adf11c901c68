"""What a forward keeps of its probabilities, so that they need not be computed again."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

# What the probabilities of one chunk of queries may take.
PROB_BYTES = 2**29


class TileShape(NamedTuple):
    """Rows (heads of a query, or of several queries) and keys of one tile of a forward."""

    rows: int
    keys: int


class TileProbs(NamedTuple):
    """exp(logit - the largest logit of its row so far), as a forward multiplies them with v.

    probs [rows of the selection, parts, tiles, tile rows, tile keys] bf16 or fp32, for each part of
    the selection row's heads; maxima [rows of the selection, parts, tiles, tile rows] fp32, in
    units of log(2). Tiles behind the length of a row, and tile rows without a head, hold anything.
    """

    probs: Tensor
    maxima: Tensor

    @classmethod
    def empty(
        cls, q: Tensor, num_rows: int, heads_per_row: int, width: int, shape: TileShape
    ) -> Self:
        """For num_rows of a selection [.., width], each of queries like q with so many heads."""
        parts, tiles = _num_tiles(heads_per_row, width, shape)
        sizes = num_rows, parts, tiles, shape.rows
        probs = torch.empty(*sizes, shape.keys, dtype=_dtype(q), device=q.device)
        return cls(probs, torch.empty(*sizes, dtype=torch.float32, device=q.device))

    def first(self, num_rows: int) -> TileProbs:
        """Those of the first rows of the selection."""
        return TileProbs(self.probs[:num_rows], self.maxima[:num_rows])


def bytes_per_row(q: Tensor, heads_per_row: int, width: int, shape: TileShape) -> int:
    """Of TileProbs, for one row of the selection."""
    parts, tiles = _num_tiles(heads_per_row, width, shape)
    return parts * tiles * shape.rows * (shape.keys * _dtype(q).itemsize + 4)


def _num_tiles(heads_per_row: int, width: int, shape: TileShape) -> tuple[int, int]:
    """Parts, and tiles, which come in pairs: two groups of warps may take turns."""
    return -(-heads_per_row // shape.rows), 2 * -(-width // (2 * shape.keys))


def _dtype(q: Tensor) -> torch.dtype:
    """fp16 would lose small probabilities."""
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
