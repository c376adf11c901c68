"""Megatron's all-to-all dispatcher, with exact and fast sums over the rows of each token."""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from glm5.ops.token_rows import copy_rows, row_places, sum_rows


class Glm5TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """MoEAlltoAllTokenDispatcher that adds up a token's rows in fp32 and rounds them once.

    So it does to the experts' results, and in the backward pass to the gradients of the rows.
    Megatron adds into bf16 in an order that differs from run to run.
    """

    places: Tensor | None = None
    """[tokens, experts per token] int64, the rows of each token from dispatch to combine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        changed = c.moe_expert_capacity_factor is not None or c.moe_pad_expert_input_to_capacity
        changed |= c.moe_router_padding_for_quantization or c.moe_permute_fusion
        assert not changed, "every token has moe_router_topk rows, in the order of experts"

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [s, b, hidden_size]; routing_map [s * b, experts] bool; probs, its weights
        -> (rows [s * b * experts per token, hidden_size], the weight of each), by expert."""
        assert self.shared_experts is None, "shared experts are the layer's"
        # Megatron sorts one column, whose order is that of all
        column = hidden_states.detach()[..., :1]
        _, row_probs = super().dispatch_preprocess(column, routing_map, probs)
        self.hidden_shape = hidden_states.shape
        tokens = self.reversed_local_input_permutation_mapping
        self.places = row_places(tokens, self.config.moe_router_topk)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return copy_rows(x, self.places), row_probs

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Rows of the experts' results as dispatch_preprocess gave them -> [s, b, hidden_size]."""
        assert self.places is not None, "nothing was dispatched"
        return sum_rows(rows, self.places).view(self.hidden_shape)


def alltoall_dispatcher(layer: MoELayer, groups: ProcessGroupCollection) -> Glm5TokenDispatcher:
    """The dispatcher of a layer's experts."""
    return Glm5TokenDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        config=layer.config,
        pg_collection=groups,
    )
