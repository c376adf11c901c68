"""A selection as the kernels read it: one list of keys for each of their programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.sparse_mla.row_lengths import row_lengths

# Scratch for the unions of one chunk of queries.
_MARK_BYTES = 256 * 2**20


class Selection(NamedTuple):
    """Keys of each group of queries.

    indices [n, width] int32; lengths [n] int32: what stands after a row's length is not read.
    queries_per_row: row i is of the queries i * queries_per_row and following. members [n, width]
    int32: bit b says that the b-th of them chose the key; None where there is one query a row.
    """

    indices: Tensor
    lengths: Tensor
    queries_per_row: int = 1
    members: Tensor | None = None

    def rows(self, some: slice) -> Selection:
        """The selection of some rows."""
        members = None if self.members is None else self.members[some]
        return Selection(self.indices[some], self.lengths[some], self.queries_per_row, members)

    def queries(self, some: slice) -> slice:
        """Which queries some rows are of."""
        return slice(some.start * self.queries_per_row, some.stop * self.queries_per_row)


def one_by_one(topk_indices: Tensor) -> Selection:
    """Every query with its own keys; topk_indices [t_q, topk] int32 contiguous."""
    return Selection(topk_indices, row_lengths(topk_indices))


@triton.jit
def _mark_kernel(topk_indices, marks, topk, num_keys, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(topk_indices + query * topk + columns, mask=columns < topk, other=-1)
    bits = tl.zeros([BLOCK], tl.int32) + (1 << (query % GROUP).to(tl.int32))
    tl.atomic_or(marks + query // GROUP * num_keys + keys, bits, mask=keys >= 0, sem="relaxed")


@triton.jit
def _union_kernel(marks, indices, members, lengths, num_keys, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count = tl.zeros([], dtype=tl.int32)
    for first in range(0, num_keys, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        marked = tl.load(marks + row * num_keys + keys, mask=keys < num_keys, other=0)
        chosen = marked != 0
        places = row * width + count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices + places, keys, mask=chosen)
        tl.store(members + places, marked, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
    tl.store(lengths + row, count)


def unions(topk_indices: Tensor, num_keys: int, queries_per_row: int) -> Selection:
    """Neighbouring queries with the union of their keys, ascending: most keys are shared.

    topk_indices [t_q, topk] int32 contiguous, in any order, -1 = none; num_keys >= 1;
    queries_per_row at most 31.
    """
    t_q, topk = topk_indices.shape
    num_rows, device = triton.cdiv(t_q, queries_per_row), topk_indices.device
    # A multiple of 16, so that rows stay aligned.
    width = triton.cdiv(max(1, min(queries_per_row * topk, num_keys)), 16) * 16
    indices = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    members = torch.empty_like(indices)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=device)
    rows_per_chunk = max(1, _MARK_BYTES // (4 * num_keys))
    block = min(2048, max(16, triton.next_power_of_2(topk)))
    for first in range(0, num_rows, rows_per_chunk):
        some = slice(first, first + rows_per_chunk)
        chosen = topk_indices[first * queries_per_row : some.stop * queries_per_row]
        marks = torch.zeros(len(lengths[some]), num_keys, dtype=torch.int32, device=device)
        if chosen.numel():
            grid = len(chosen), triton.cdiv(topk, block)
            _mark_kernel[grid](chosen, marks, topk, num_keys, GROUP=queries_per_row, BLOCK=block)
        _union_kernel[(len(marks),)](
            marks, indices[some], members[some], lengths[some], num_keys, width, BLOCK=2048
        )
    return Selection(indices, lengths, queries_per_row, members)
