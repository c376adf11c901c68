"""How many leading entries of each row of indices a kernel has to look at."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _row_lengths_kernel(topk_indices, lengths, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    length = tl.zeros([], dtype=tl.int32)
    for start in range(0, topk, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        indices = tl.load(topk_indices + row * topk + columns, mask=columns < topk, other=-1)
        length = tl.maximum(length, tl.max(tl.where(indices >= 0, columns + 1, 0), 0))
    tl.store(lengths + row, length)


def row_lengths(topk_indices: Tensor) -> Tensor:
    """One past the last entry that is a key: everything after it is a tail of -1.

    topk_indices [t_q, topk] int32 -> [t_q] int32, 0 for a row without keys.
    """
    t_q, topk = topk_indices.shape
    lengths = torch.empty(t_q, dtype=torch.int32, device=topk_indices.device)
    if t_q:
        block = min(2048, max(16, triton.next_power_of_2(topk)))
        _row_lengths_kernel[(t_q,)](topk_indices, lengths, topk, BLOCK=block)
    return lengths
