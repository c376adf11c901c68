"""From packed documents to the keys that each token may see."""

from itertools import pairwise

import torch
from torch import Tensor

from glm5.errors import DataError

_INTEGER_DTYPES = (torch.int32, torch.int64)


def document_bounds(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Causal key bounds of packed documents: key j is valid for row i iff starts[i] <= j < ends[i].

    cu_seqlens [num_documents + 1] int32 or int64, on any device: 0, then the end of each document,
    the last of them num_tokens; empty documents are allowed. -> starts, ends, each [num_tokens]
    int32 on the same device, with ends[i] = i + 1. No host sync, hence no check of the values:
    every layer calls this, and `check_cu_seqlens` is called once where the tokens come in.
    """
    rows = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    return cu_seqlens[document].to(torch.int32), (rows + 1).to(torch.int32)


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Check that cu_seqlens describes documents that cover num_tokens tokens; one host sync.

    Raises DataError when it is not one ascending row of integers from 0 to num_tokens.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in _INTEGER_DTYPES:
        raise DataError(
            "cu_seqlens is not a row of integers",
            got=f"shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}",
            expected="[num_documents + 1] of int32 or int64",
        )
    fault = _first_fault(cu_seqlens.tolist(), num_tokens)
    if fault is not None:
        raise DataError(
            "cu_seqlens does not describe packed documents",
            got=fault,
            expected=f"0, then the ascending end positions of the documents, up to {num_tokens}",
            remedy="pass the cumulative sum of the document lengths, with a leading 0",
        )


def _first_fault(edges: list[int], num_tokens: int) -> str | None:
    if edges[0] != 0:
        return f"the first entry is {edges[0]}"
    for i, (before, after) in enumerate(pairwise(edges)):
        if after < before:
            return f"entry {i + 1} is {after}, after {before}"
    if edges[-1] != num_tokens:
        return f"the last entry is {edges[-1]}, with {num_tokens} tokens"
    return None
