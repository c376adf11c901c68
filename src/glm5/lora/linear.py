"""LoRA around a Megatron-Core linear."""

from __future__ import annotations

from typing import cast

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from glm5.lora.factors import Adapted
from glm5.model.frozen import FrozenParallelLinear, FrozenReplicatedLinear
from glm5.model.transformer_config import Glm5TransformerConfig
from glm5.ops.grouped import MAX_RANK, GroupedPair


class LoraLinear(Adapted):
    """y = base(x) + delta(x), where the base's rows are the linears `hf_linears`, stacked.

    `linear_fc1` holds gate_proj above up_proj; each has a pair of its own, as each is a linear of
    its own in the checkpoint. x [..., in_features] -> (y [..., out_features], the base's bias).
    A frozen float8 base adds the pairs inside its product. Beside any other one tokens travel
    between ranks as the base's do, but as A x, which is `rank` wide.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        seen = self.pair_input(x)
        if self._base_adds_pairs():
            return self.base(x, self._grouped_pairs(x.dtype), None if seen is x else seen)
        y, bias = self.base(x)
        parts = y.chunk(len(self.hf_linears), dim=-1)
        adapted = [
            self._adapt(name, seen, part) for name, part in zip(self.hf_linears, parts, strict=True)
        ]
        return torch.cat(adapted, dim=-1) if len(adapted) > 1 else adapted[0], bias

    def _base_adds_pairs(self) -> bool:
        if not isinstance(self.base, FrozenReplicatedLinear | FrozenParallelLinear):
            return False
        gathers_tokens = self.split == "column" and self.base.config.sequence_parallel
        ranks = [self.pair(name).a.shape[0] for name in self.pairs]
        return not gathers_tokens and max(ranks) <= MAX_RANK

    def _grouped_pairs(self, dtype: torch.dtype) -> list[GroupedPair | None]:
        """Those of all linears, as of a single group."""
        return [
            self._grouped_pair(name, dtype) if name in self.pairs else None
            for name in self.hf_linears
        ]

    def _grouped_pair(self, name: str, dtype: torch.dtype) -> GroupedPair:
        pair = self.pair(name)
        return GroupedPair(pair.a[None].to(dtype), pair.b[None].to(dtype), pair.scale)

    def _adapt(self, name: str, x: Tensor, part: Tensor) -> Tensor:
        """part + scale B A x, added in one product; the base may compute in another dtype than x
        (the indexer's head weights are fp32)."""
        if name not in self.pairs:
            return part
        pair = self.pair(name)
        low, b = self._exchange(pair.down(x)).to(part.dtype), pair.b.to(part.dtype)
        rows, low_rows = (y.reshape(-1, y.shape[-1]) for y in (part, low))
        return torch.addmm(rows, low_rows, b.t(), alpha=pair.scale).view(part.shape)

    def _exchange(self, low: Tensor) -> Tensor:
        """A x of the tokens that this rank's B needs: gathered, or summed over parts of x."""
        if self.split == "whole":
            return low
        config = cast(Glm5TransformerConfig, self.base.config)
        if self.split == "column":
            return gather_from_sequence_parallel_region(low) if config.sequence_parallel else low
        return reduce_scatter_to_sequence_parallel_region(low) if config.sequence_parallel else low
