"""LoRA around a Megatron-Core linear."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.lora.factors import Adapted


class LoraLinear(Adapted):
    """y = base(x) + delta(x), where the base's rows are the linears `hf_linears`, stacked.

    `linear_fc1` holds gate_proj above up_proj; each has a pair of its own, as each is a linear of
    its own in the checkpoint. x [..., in_features] -> (y [..., out_features], the base's bias).
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y, bias = self.base(x)
        parts = y.chunk(len(self.hf_linears), dim=-1)
        adapted = [
            self._adapt(name, x, part) for name, part in zip(self.hf_linears, parts, strict=True)
        ]
        return torch.cat(adapted, dim=-1) if len(adapted) > 1 else adapted[0], bias

    def _adapt(self, name: str, x: Tensor, part: Tensor) -> Tensor:
        # the base may compute in another dtype than x (the indexer's head weights are fp32)
        return part + self.pair(name)(x).to(part.dtype) if name in self.pairs else part
