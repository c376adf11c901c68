"""What an adapter is: ranks, scales, targets, and the layout of those of routed experts; no
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from glm5.lora.patterns import by_pattern

ExpertLora = Literal["per_expert", "shared_outer", "none"]


@dataclass(frozen=True, slots=True)
class PairSpec:
    """One pair: delta W = scale * B A with A [rank, in]."""

    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which linears are adapted and how; delta W = alpha / rank * B A.

    Patterns are PEFT's, on the Hugging Face path of a linear such as
    `model.layers.3.mlp.experts.0.up_proj`.
    """

    adapter_rank: int
    adapter_alpha: float
    targets: tuple[str, ...]
    """Hugging Face names of linears."""
    dropout: float = 0.0
    """Probability with which an element of a pair's input is dropped in training."""
    use_rslora: bool = False
    """Whether the scale is alpha / sqrt(rank) (arXiv 2312.03732)."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Other ranks, by pattern: the first one that matches a path or an ending of it counts."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Other alphas, likewise."""
    exclude: tuple[str, ...] | str = ()
    """Linears that get no adapter: endings of their paths, or one regular expression for paths."""
    expert_lora: ExpertLora = "per_expert"
    """Routed experts: a pair for each; one A for all of gate and up and one B for all of down
    (the other factor each its own); or none."""

    def pair(self, hf_path: str) -> PairSpec:
        """Of the linear at this path."""
        rank = by_pattern(self.rank_pattern, hf_path, self.adapter_rank)
        alpha = by_pattern(self.alpha_pattern, hf_path, self.adapter_alpha)
        return PairSpec(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))
