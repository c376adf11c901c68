"""Megatron's gated MLP as a class of its own.

Every Megatron-Core builds a class that stands in a spec the same way. What it does with parts of
classes differs: older ones want a ModuleSpec, newer ones a function.
"""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from glm5.model.linears import linears_of
from glm5.model.transformer_config import Glm5TransformerConfig


class DenseMLP(MLP):
    """Megatron's MLP of a dense layer, of its own linears."""

    def __init__(
        self,
        config: Glm5TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        del pg_collection, is_mtp_layer, name
        super().__init__(config, mlp_linears(config), ffn_hidden_size=config.ffn_hidden_size)


def mlp_linears(config: Glm5TransformerConfig) -> MLPSubmodules:
    """Linears that need no Transformer Engine, for the base weights that the model has."""
    linears = linears_of(config)
    return MLPSubmodules(linear_fc1=linears.column, linear_fc2=linears.row)
