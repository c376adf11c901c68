"""From packed documents to the keys that each token may see."""

from itertools import pairwise

import torch
from torch import Tensor

from glm5.errors import DataError

_INTEGER_DTYPES = (torch.int32, torch.int64)


def document_bounds(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Causal key bounds of packed documents: key j is valid for row i iff starts[i] <= j < ends[i].

    cu_seqlens [num_documents + 1] int32 or int64, on any device: 0, then the end of each document.
    Empty documents are allowed. -> starts, ends, each [t] int32 on the same device, with
    t = cu_seqlens[-1] and ends[i] = i + 1. One host sync: cu_seqlens is read once, to check it.
    Raises DataError when cu_seqlens is not one ascending row of integers that starts with 0.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in _INTEGER_DTYPES:
        raise DataError(
            "cu_seqlens is not a row of integers",
            got=f"shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}",
            expected="[num_documents + 1] of int32 or int64",
        )
    edges = cu_seqlens.tolist()
    fault = _first_fault(edges)
    if fault is not None:
        raise DataError(
            "cu_seqlens does not describe packed documents",
            got=fault,
            expected="0, then the ascending end positions of the documents",
            remedy="pass the cumulative sum of the document lengths, with a leading 0",
        )
    starts = torch.repeat_interleave(
        cu_seqlens[:-1].to(torch.int32), cu_seqlens.diff(), output_size=edges[-1]
    )
    ends = torch.arange(1, edges[-1] + 1, dtype=torch.int32, device=cu_seqlens.device)
    return starts, ends


def _first_fault(edges: list[int]) -> str | None:
    if edges[0] != 0:
        return f"the first entry is {edges[0]}"
    for i, (before, after) in enumerate(pairwise(edges)):
        if after < before:
            return f"entry {i + 1} is {after}, after {before}"
    return None
