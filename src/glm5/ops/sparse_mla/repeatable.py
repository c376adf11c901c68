"""Backward of sparse_mla whose bits are the same every time: no atomics, a fixed order of sums."""

import math

import torch
from torch import Tensor

from glm5.ops.sparse_mla.kernels import Kernels
from glm5.ops.sparse_mla.key_lists import bytes_per_row, key_lists
from glm5.ops.sparse_mla.key_sums import add_key_rows
from glm5.ops.sparse_mla.selection import Selection

# What the terms of one chunk of the selection, and the lists of its keys, may take.
ROW_BYTES = 4 * 2**30
LIST_BYTES = 2**29
# Slices of every tensor stay aligned to 16 bytes.
_ALIGNED_ROWS = 8


def repeatable_bwd(
    kernels: Kernels,
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """As kernels.backward, chunk by chunk: every row of the selection writes its terms of its keys'
    gradients, rounded to the dtype of q, and one program per key adds them up in fp32, in the order
    of the rows.

    Takes and returns what portable_bwd.sparse_mla_bwd does. Up to ROW_BYTES + LIST_BYTES of
    temporary memory.
    """
    grad_q = torch.empty_like(q)
    sums = torch.zeros_like(kv, dtype=torch.float32)
    num_rows, width = selection.indices.shape
    num_parts, d = kernels.num_row_parts(q, out.shape[2]), q.shape[2]
    chunk = _chunk(num_rows, num_parts * width * d * q.itemsize, len(kv))
    # Once for all chunks: two of them would be alive while the name passes on.
    terms = q.new_empty(min(chunk, num_rows), num_parts, width, d)
    for first in range(0, num_rows, chunk):
        some = slice(first, first + chunk)
        part, queries = selection.rows(some), selection.queries(some)
        rows = terms[: len(part.lengths)]
        kernels.backward_rows(
            grad_out[queries],
            q[queries],
            kv,
            part,
            out[queries],
            lse[queries],
            softmax_scale,
            grad_q[queries],
            rows,
        )
        add_key_rows(
            rows,
            key_lists(part.indices, part.lengths, len(kv)),
            sums,
            shuffled=kernels.shuffles_rows,
        )
    return grad_q, sums.to(kv.dtype)


def _chunk(num_rows: int, row_bytes: int, num_keys: int) -> int:
    """Rows of each of the fewest equal chunks that keep to the budgets."""
    by_rows = ROW_BYTES // max(1, row_bytes)
    by_lists = LIST_BYTES // max(1, bytes_per_row(num_keys))
    most = max(1, min(by_rows, by_lists) // _ALIGNED_ROWS) * _ALIGNED_ROWS
    equal = math.ceil(num_rows / max(1, math.ceil(num_rows / most)))
    return max(1, math.ceil(equal / _ALIGNED_ROWS)) * _ALIGNED_ROWS
