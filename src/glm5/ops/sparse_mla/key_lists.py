"""The inverse of a selection: which entries of topk_indices chose each key, in their order."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Not fitted to the rows: their number changes from step to step, and would compile anew.
_BLOCK = 1024


class KeyLists(NamedTuple):
    """entries [t_k, n] int32: the first counts[j] of row j say where key j is in the selection, as
    row * width + column, ascending; the rest is not written. counts [t_k] int32.
    """

    entries: Tensor
    counts: Tensor


def bytes_per_row(num_keys: int) -> int:
    """Memory of key_lists for each row of the selection, temporaries included."""
    return (2 + 4) * num_keys


@triton.jit(do_not_specialize=["num_rows", "width"])
def _columns_kernel(indices, lengths, columns_of, num_rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < tl.load(lengths + row)
    keys = tl.load(indices + row * width + columns, mask=is_column, other=-1)
    places = keys.to(tl.int64) * num_rows + row
    tl.store(columns_of + places, columns.to(columns_of.dtype.element_ty), mask=keys >= 0)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _key_lists_kernel(columns_of, entries, counts, num_rows, width, BLOCK: tl.constexpr):
    key = tl.program_id(0).to(tl.int64)
    count = tl.zeros([], dtype=tl.int32)
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        mask = rows < num_rows
        columns = tl.load(columns_of + key * num_rows + rows, mask=mask, other=-1).to(tl.int32)
        chosen = columns >= 0
        places = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(entries + key * num_rows + places, rows * width + columns, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
    tl.store(counts + key, count)


def key_lists(indices: Tensor, lengths: Tensor, num_keys: int) -> KeyLists:
    """List the entries that chose each of num_keys keys, without atomics: the same every time.

    indices [n, width] int32 contiguous, each key at most once in a row, -1 = none, not read from
    lengths [n] int32 on; n * width below 2^31.
    """
    num_rows, width = indices.shape
    dtype = torch.int16 if width <= 2**15 else torch.int32
    columns_of = indices.new_full((num_keys, num_rows), -1, dtype=dtype)
    entries, counts = indices.new_empty(num_keys, num_rows), indices.new_empty(num_keys)
    if num_keys == 0:
        return KeyLists(entries, counts)
    if indices.numel():
        grid = num_rows, triton.cdiv(width, _BLOCK)
        _columns_kernel[grid](indices, lengths, columns_of, num_rows, width, BLOCK=_BLOCK)
    _key_lists_kernel[(num_keys,)](columns_of, entries, counts, num_rows, width, BLOCK=_BLOCK)
    return KeyLists(entries, counts)
