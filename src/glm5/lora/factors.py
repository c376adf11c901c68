"""The low-rank pair of one Hugging Face linear."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn


class LoraPair(nn.Module):
    """Delta W = scale * B A for one linear (arXiv 2106.09685); B starts at zero, so the delta does.

    a [rank, in_features], b [out_features, rank], in the dtype and on the device of the base weight.
    """

    def __init__(
        self, rank: int, in_features: int, out_features: int, scale: float, like: Tensor
    ) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(like.new_empty(rank, in_features))
        self.b = nn.Parameter(like.new_zeros(out_features, rank))
        for parameter in (self.a, self.b):
            # Megatron reduces gradients of experts and of the rest over different groups
            _copy_attribute(like, parameter, "allreduce")

    def initialise(self, seed: int, name: str) -> None:
        """A uniform in +-1/sqrt(in_features), from (seed, name) alone: the same in every layout."""
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        bound = 1 / math.sqrt(self.a.shape[1])
        values = torch.empty(self.a.shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            self.a.copy_(values)
            self.b.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> scale * B A x [..., out_features], in the dtype of x."""
        a, b = self.a.to(x.dtype), self.b.to(x.dtype)
        return nn.functional.linear(nn.functional.linear(x, a), b) * self.scale


def _copy_attribute(source: Any, target: Any, name: str) -> None:
    if hasattr(source, name):
        setattr(target, name, getattr(source, name))
