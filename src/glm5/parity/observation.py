"""What is looked at on both sides of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Observation:
    """One forward and backward over packed documents of t tokens in all.

    logits [t, vocab]; hidden[layer] [t, hidden_size] after each decoder layer; per full layer
    scores[layer] [t, t] fp32 (only columns of the same document are set) and selected[layer]
    [t, topk] int32 in packed positions; gradients by Hugging Face tensor name.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def document_slices(lengths: Sequence[int]) -> list[slice]:
    """Where each document lies in the packed row."""
    slices, start = [], 0
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return slices


def next_token_loss(logits: Tensor, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean cross-entropy of the next token in each document; logits [t, vocab], token_ids [t]."""
    total, count = logits.new_zeros(()), 0
    for part in document_slices(lengths):
        predicted, wanted = logits[part][:-1], token_ids[part][1:]
        total = total + F.cross_entropy(predicted.float(), wanted, reduction="sum")
        count += wanted.numel()
    return total / max(count, 1)


def block_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[t, t] bool: key j is in the document of query i and not after it."""
    total = sum(lengths)
    mask = torch.zeros(total, total, dtype=torch.bool, device=device)
    for part in document_slices(lengths):
        mask[part, part] = True
    return mask.tril()
