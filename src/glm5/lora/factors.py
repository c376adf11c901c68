"""Low-rank pairs, and the module that carries those of one Megatron linear."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


class LoraPair(nn.Module):
    """Delta W = scale * B A for one linear (arXiv 2106.09685); B starts at zero, so the delta does.

    a [rank, in_features], b [out_features, rank], in the dtype and on the device of the base
    weight.
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


class Adapted(nn.Module):
    """A frozen base linear whose rows are `hf_linears`, with a pair for each of `wanted`."""

    def __init__(
        self,
        base: nn.Module,
        hf_linears: Sequence[str],
        wanted: Sequence[str],
        *,
        rank: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.base = base
        self.hf_linears = tuple(hf_linears)
        weight = cast(Tensor, base.weight)
        rows, in_features = weight.shape[0] // len(self.hf_linears), weight.shape[1]
        self.pairs = nn.ModuleDict(
            {name: LoraPair(rank, in_features, rows, scale, weight) for name in wanted}
        )

    def pair(self, hf_linear: str) -> LoraPair:
        """The pair of one Hugging Face linear."""
        return cast(LoraPair, self.pairs[hf_linear])


def _copy_attribute(source: Any, target: Any, name: str) -> None:
    if hasattr(source, name):
        setattr(target, name, getattr(source, name))
