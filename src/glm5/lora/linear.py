"""LoRA around a Megatron-Core linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glm5.lora.factors import LoraPair


class LoraLinear(nn.Module):
    """y = base(x) + delta(x), where the base's rows are the Hugging Face linears `hf_linears`, stacked.

    `linear_fc1` holds gate_proj above up_proj; each has a pair of its own, as each is a linear of its
    own in the checkpoint. x [..., in_features] -> (y [..., out_features], the base's bias).
    """

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
        out_features, in_features = base.weight.shape
        rows = out_features // len(self.hf_linears)
        self.pairs = nn.ModuleDict(
            {name: LoraPair(rank, in_features, rows, scale, base.weight) for name in wanted}
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y, bias = self.base(x)
        parts = y.chunk(len(self.hf_linears), dim=-1)
        adapted = [
            self._adapt(name, x, part) for name, part in zip(self.hf_linears, parts, strict=True)
        ]
        return torch.cat(adapted, dim=-1) if len(adapted) > 1 else adapted[0], bias

    def _adapt(self, name: str, x: Tensor, part: Tensor) -> Tensor:
        # the base may compute in another dtype than x (the indexer's head weights are fp32)
        return part + self.pairs[name](x).to(part.dtype) if name in self.pairs else part
