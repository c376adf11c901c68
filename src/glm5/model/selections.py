"""Which keys the queries of one document selected in one layer, packed on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.ops.key_sets import rows_per_chunk

# Of one key of a bitmap's row while it is unpacked: flags, counts, places.
_BYTES_PER_KEY = 24


@dataclass(frozen=True)
class PackedSelection:
    """The keys of a document's queries topk, topk + 1, ...: earlier ones select all that they see.

    rows on the host, a row for each such query: [n, ceil(keys / 8)] uint8 bitmaps, of which bit
    j % 8 (least significant first) of byte j // 8 says that key j is selected; or [n, topk] uint16
    or int32, the keys ascending. Every row has topk keys, counted from the document's first token.
    """

    rows: Tensor
    topk: int

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.itemsize

    def decode(self, some: range, device: torch.device) -> Tensor:
        """The keys of some rows: [len(some), topk] int32 on `device`, ascending.

        The host waits for nothing; the same rows always give the same keys.
        """
        rows = self.rows[some.start : some.stop : some.step]
        if device.type == "cuda":
            rows = rows.contiguous().pin_memory().to(device, non_blocking=True)
        if rows.dtype != torch.uint8:
            return rows.to(torch.int32)
        parts = rows.split(rows_per_chunk(8 * rows.shape[1] * _BYTES_PER_KEY))
        keys = torch.empty(len(rows), self.topk, dtype=torch.int32, device=device)
        for part, out in zip(parts, keys.split([len(part) for part in parts]), strict=True):
            out.copy_(_set_bits(part, self.topk))
        return keys


class DocumentSelection(NamedTuple):
    """A document's selections, and where in the packed row its first token stands."""

    start: int
    selection: PackedSelection


@dataclass(frozen=True)
class LayerSelections:
    """The recorded selections of a layer: of the documents that are longer than index_topk."""

    index_topk: int
    documents: tuple[DocumentSelection, ...]

    def rows(self, queries: range, starts: Tensor, ends: Tensor) -> Tensor:
        """The topk_indices [len(queries), index_topk] int32 of some queries of the packed row.

        starts, ends as in `TokenRow`, of these queries. The first index_topk queries of a document
        select all keys that they see; one that has no record (a document's last token) gets none.
        """
        columns = torch.arange(self.index_topk, dtype=torch.int32, device=starts.device)
        num_keys = ends - starts
        selects_all = (num_keys <= self.index_topk)[:, None] & (columns < num_keys[:, None])
        keys = torch.where(selects_all, starts[:, None] + columns, -1)
        for places, recorded in self.recorded(queries, starts.device):
            keys[places] = recorded
        return keys

    def recorded(self, queries: range, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Of some queries of the packed row, those that have a record.

        -> (their places among `queries`, their keys [n, index_topk] int32 ascending), in positions
        of the packed row.
        """
        for start, selection in self.documents:
            first = start + self.index_topk
            places = _places_within(queries, range(first, first + len(selection.rows)))
            if places:
                some = queries[places.start : places.stop]
                inside = range(some.start - first, some.stop - first, some.step)
                yield (
                    slice(places.start, places.stop),
                    selection.decode(inside, device) + start,
                )


def _places_within(numbers: range, block: range) -> range:
    """Which places of the ascending `numbers` hold one of the consecutive numbers of `block`."""
    step = numbers.step
    first, after = (
        min(max(0, -((numbers.start - bound) // step)), len(numbers))
        for bound in (block.start, block.stop)
    )
    return range(first, after)


def _set_bits(bitmaps: Tensor, topk: int) -> Tensor:
    """bitmaps [n, width] uint8 with topk set bits a row -> their positions [n, topk] int32."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmaps.device)
    flags = ((bitmaps[:, :, None] >> shifts) & 1).flatten(1).bool()
    # what is not set lands in one spare column, which is cut off
    places = flags.cumsum(1, dtype=torch.int32).sub_(1).masked_fill_(~flags, topk)
    positions = torch.arange(flags.shape[1], dtype=torch.int32, device=flags.device)
    keys = positions.new_empty(len(flags), topk + 1)
    return keys.scatter_(1, places.long(), positions.expand_as(places))[:, :topk]
