"""Which classes hold the weights that an FP8 release quantises."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from glm5.model.experts import GroupedLinear
from glm5.model.frozen import (
    FrozenColumnLinear,
    FrozenGroupedLinear,
    FrozenLatentUpProjection,
    FrozenReplicatedLinear,
    FrozenRowLinear,
)
from glm5.model.linear import LatentUpProjection, ReplicatedLinear
from glm5.model.transformer_config import BaseWeights, Glm5TransformerConfig


@dataclass(frozen=True)
class Linears:
    """By how ranks share them; they take the same arguments, and carry the same adapters."""

    replicated: type[ReplicatedLinear] | type[FrozenReplicatedLinear]
    column: type[ColumnParallelLinear] | type[FrozenColumnLinear]
    row: type[RowParallelLinear] | type[FrozenRowLinear]
    latent_up: type[LatentUpProjection] | type[FrozenLatentUpProjection]
    grouped: type[GroupedLinear]


def linears_of(config: Glm5TransformerConfig) -> Linears:
    """Those of the model's base weights."""
    return _LINEARS[config.base_weights]


_LINEARS: dict[BaseWeights, Linears] = {
    "dtype": Linears(
        ReplicatedLinear,
        ColumnParallelLinear,
        RowParallelLinear,
        LatentUpProjection,
        GroupedLinear,
    ),
    "fp8": Linears(
        FrozenReplicatedLinear,
        FrozenColumnLinear,
        FrozenRowLinear,
        FrozenLatentUpProjection,
        FrozenGroupedLinear,
    ),
}
