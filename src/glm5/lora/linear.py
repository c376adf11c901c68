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
from glm5.model.transformer_config import Glm5TransformerConfig


class LoraLinear(Adapted):
    """y = base(x) + delta(x), where the base's rows are the linears `hf_linears`, stacked.

    `linear_fc1` holds gate_proj above up_proj; each has a pair of its own, as each is a linear of
    its own in the checkpoint. x [..., in_features] -> (y [..., out_features], the base's bias).
    Tokens travel between ranks as the base's do, but as A x, which is `rank` wide.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y, bias = self.base(x)
        parts, seen = y.chunk(len(self.hf_linears), dim=-1), self.pair_input(x)
        adapted = [
            self._adapt(name, seen, part) for name, part in zip(self.hf_linears, parts, strict=True)
        ]
        return torch.cat(adapted, dim=-1) if len(adapted) > 1 else adapted[0], bias

    def _adapt(self, name: str, x: Tensor, part: Tensor) -> Tensor:
        if name not in self.pairs:
            return part
        pair = self.pair(name)
        low = self._exchange(pair.down(x))
        # the base may compute in another dtype than x (the indexer's head weights are fp32)
        return part + pair.up(low).to(part.dtype)

    def _exchange(self, low: Tensor) -> Tensor:
        """A x of the tokens that this rank's B needs: gathered, or summed over parts of x."""
        if self.split == "whole":
            return low
        config = cast(Glm5TransformerConfig, self.base.config)
        if self.split == "column":
            return gather_from_sequence_parallel_region(low) if config.sequence_parallel else low
        return reduce_scatter_to_sequence_parallel_region(low) if config.sequence_parallel else low
