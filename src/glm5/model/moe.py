"""Megatron's experts layer and router, which can be told the experts of each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import (
    get_default_pg_collection,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from glm5.model.dispatcher import alltoall_dispatcher
from glm5.model.grouped_experts import GroupedExperts
from glm5.model.mlp import mlp_linears
from glm5.model.parallel import token_rows
from glm5.model.replay import LayerChoices
from glm5.model.transformer_config import Glm5TransformerConfig

# Tensors that Megatron's dispatchers and ours keep from dispatch to combine.
_NOTES = (
    "probs", "routing_map", "local_probs", "local_map", "reversed_local_input_permutation_mapping",
    "places",
)  # fmt: skip


class Glm5Router(TopKRouter):
    """weights = scale * s_e / sum s over the chosen experts e, s = sigmoid(logits).

    The experts are the largest of s + bias, or those of a replay; either way the weights come from
    this router's logits, so that its gradients survive (arXiv 2510.11370).
    """

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, choices: LayerChoices | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [s, b, hidden_size] -> (weights [s * b, experts], 0 where a token does not go; the
        same as bool)."""
        if choices is None:
            return super().forward(x, padding_mask)
        assert padding_mask is None, "padding has documents of its own; padding_mask must be None"
        self._maintain_float32_expert_bias()
        logits = self.gating(x).view(-1, self.num_experts)
        weights, routing_map = topk_routing_with_score_function(
            logits,
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=_Told(partial(self._experts, choices)),
        )
        self._apply_expert_bias(routing_map)
        return weights, routing_map

    def _experts(self, choices: LayerChoices, own: Tensor) -> Tensor:
        """own [t, experts per token] int64, of the tokens that this rank has -> those to take."""
        tokens = token_rows(len(own), shared=self.config.sequence_parallel)
        replayed = choices.take_experts()
        if choices.observer is not None:
            choices.observer.see_experts(choices.layer, tokens, own)
        if replayed is None:
            return own
        replayed = replayed[tokens.start : tokens.stop].long()
        return torch.where(replayed < 0, own, replayed)


class _Told:
    """What Megatron's routing asks for a token's experts: it replays what `choose` makes of them.

    `choose` takes and gives [t, experts per token] int64.
    """

    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        self.choose = choose

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """(scores of the experts, experts), both [t, topk]; scores [t, experts]."""
        _, own = default_compute_topk(scores, topk, num_groups, group_topk)
        experts = self.choose(own)
        return scores.gather(1, experts), experts


class SharedExperts(SharedExpertMLP):
    """Megatron's shared experts, of its own linears."""

    def __init__(
        self,
        config: Glm5TransformerConfig,
        *,
        gate: bool,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        del name
        super().__init__(config, mlp_linears(config), gate, pg_collection)


class Glm5MoELayer(MoELayer):
    """MoELayer whose router may be told which experts to take, with our all-to-all dispatcher."""

    def __init__(
        self,
        config: Glm5TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        # both name what Megatron logs of balancing losses, and there are none
        del is_mtp_layer, name
        parts = MoESubmodules(
            experts=GroupedExperts, shared_experts=SharedExperts, router=Glm5Router
        )
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, parts, pg_collection=groups)
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = alltoall_dispatcher(self, groups)

    def forward(
        self, x: Tensor, choices: LayerChoices | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [s, b, hidden_size] -> (output of that shape, no bias)."""
        compute = partial(self._compute, choices)
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(compute, False, x), None
        return compute(x), None

    def _compute(self, choices: LayerChoices | None, x: Tensor) -> Tensor:
        shared = self.shared_experts_compute(x)
        weights, routing_map = self.router(x, choices=choices)
        tokens, weights = self.preprocess(x, weights, routing_map)
        dispatched, weights = self.dispatch(tokens, weights)
        output, _ = self.routed_experts_compute(dispatched, weights)
        output = self.postprocess(self.combine(output), shared)
        _forget_tokens(self.token_dispatcher)
        return output


def _forget_tokens(dispatcher: MoETokenDispatcher) -> None:
    """Drops what a dispatcher notes of the tokens that it has just brought back.

    Until the next forward pass it would keep the graph of the router's weights alive, and with full
    recompute each layer's input and its gradient beyond the backward pass.
    """
    for name in _NOTES:
        if hasattr(dispatcher, name):
            setattr(dispatcher, name, None)
