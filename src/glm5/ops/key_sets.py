"""Which keys each query row may use, and how the rows are cut so that memory stays bounded."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.errors import BackendError

# Budget for the temporaries of one chunk of query rows, whatever the sequence length.
CHUNK_BYTES = 64 * 2**20


class Chunk(NamedTuple):
    """Some query rows, and the contiguous range of keys that they touch."""

    rows: slice
    keys: slice


def rows_per_chunk(bytes_per_row: int) -> int:
    """Number of query rows whose temporaries fit in CHUNK_BYTES; at least one."""
    return max(1, CHUNK_BYTES // max(1, bytes_per_row))


@dataclass(frozen=True)
class KeyBounds:
    """Row i may use the keys in [starts[i], ends[i]); none where ends[i] <= starts[i].

    starts, ends [t_q] integer.
    """

    starts: Tensor
    ends: Tensor

    def chunks(self, num_keys: int, num_rows: int) -> list[Chunk]:
        """The non-empty chunks of num_rows rows each. One host sync."""
        if len(self.starts) == 0:
            return []
        some = self.ends > self.starts
        lows = self.starts.where(some, num_keys).split(num_rows)
        highs = self.ends.where(some, 0).split(num_rows)
        ranges = [(low.amin(), high.amax()) for low, high in zip(lows, highs, strict=True)]
        return _to_chunks(ranges, len(self.starts), num_keys, num_rows)

    def mask(self, chunk: Chunk) -> Tensor:
        """-> [rows, keys] bool, true where the row may use the key."""
        positions = torch.arange(chunk.keys.start, chunk.keys.stop, device=self.starts.device)
        starts, ends = self.starts[chunk.rows, None], self.ends[chunk.rows, None]
        return (positions >= starts) & (positions < ends)


@dataclass(frozen=True)
class KeySelection:
    """Row i may use the keys topk_indices[i]; a negative entry is none.

    topk_indices [t_q, topk] int32, in any order.
    """

    topk_indices: Tensor

    def chunks(self, num_keys: int, num_rows: int) -> list[Chunk]:
        """The non-empty chunks of num_rows rows each. One host sync."""
        if self.topk_indices.numel() == 0:
            return []
        ranges = [
            (part.masked_fill(part < 0, num_keys).amin(), part.amax() + 1)
            for part in self.topk_indices.split(num_rows)
        ]
        return _to_chunks(ranges, len(self.topk_indices), num_keys, num_rows)

    def mask(self, chunk: Chunk) -> Tensor:
        """-> [rows, keys] bool, true where the row selected the key."""
        slots, num_keys = self._slots(chunk)
        mask = torch.zeros(len(slots), num_keys + 1, dtype=torch.bool, device=slots.device)
        return mask.scatter_(1, slots, True)[:, :num_keys]

    def by_entry(self, values: Tensor, chunk: Chunk) -> Tensor:
        """values [rows, keys] of the chunk -> [rows, topk], 0 where there is no key."""
        slots, _ = self._slots(chunk)
        return torch.nn.functional.pad(values, (0, 1)).gather(1, slots)

    def by_key(self, values: Tensor, chunk: Chunk) -> Tensor:
        """values [rows, topk] of the chunk's rows -> [rows, keys], 0 for keys not selected."""
        slots, num_keys = self._slots(chunk)
        return values.new_zeros(len(slots), num_keys + 1).scatter_(1, slots, values)[:, :num_keys]

    def _slots(self, chunk: Chunk) -> tuple[Tensor, int]:
        """Columns of the entries [rows, topk] int64 among the chunk's keys, and their number.

        Entries without a key are in one spare column behind them.
        """
        indices = self.topk_indices[chunk.rows].long() - chunk.keys.start
        num_keys = chunk.keys.stop - chunk.keys.start
        return indices.masked_fill_(indices < 0, num_keys), num_keys


def _to_chunks(
    ranges: list[tuple[Tensor, Tensor]], num_rows_total: int, num_keys: int, num_rows: int
) -> list[Chunk]:
    bounds = torch.stack([torch.stack(pair) for pair in ranges]).tolist()
    chunks = []
    for first_row, (low, high) in zip(range(0, num_rows_total, num_rows), bounds, strict=True):
        if low >= high:
            continue
        if low < 0 or high > num_keys:
            raise BackendError(
                "a query row refers to keys that do not exist",
                got=f"keys [{low}, {high}) in rows from {first_row} on",
                expected=f"keys within [0, {num_keys})",
                remedy="give starts, ends and topk_indices as positions in k, not in a document",
            )
        rows = slice(first_row, min(first_row + num_rows, num_rows_total))
        chunks.append(Chunk(rows, slice(low, high)))
    return chunks
