"""Megatron's experts layer and router, which can be told the experts of each token."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from glm5.model.parallel import token_rows
from glm5.model.replay import LayerChoices


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
        weights, routing_map = self._route(logits, self._experts(logits, choices))
        self._apply_expert_bias(routing_map)
        return weights, routing_map

    def _experts(self, logits: Tensor, choices: LayerChoices) -> Tensor:
        """[t, experts per token] int64 of the tokens that this rank has."""
        _, own = self._route(logits, None)
        tokens = token_rows(len(logits), shared=self.config.sequence_parallel)
        replayed = choices.take_experts()
        if choices.observer is not None:
            choices.observer.see_experts(choices.layer, tokens, own)
        if replayed is None:
            return own
        replayed = replayed[tokens.start : tokens.stop].long()
        return torch.where(replayed < 0, own, replayed)

    def _route(self, logits: Tensor, experts: Tensor | None) -> tuple[Tensor, Tensor]:
        """With experts [t, k] (weights, map) [t, experts]; without, those it chooses, [t, k]."""
        weights, where = topk_routing_with_score_function(
            logits,
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            dense_output=experts is None,
            precomputed_indices=experts,
        )
        return weights, where


class Glm5MoELayer(MoELayer):
    """MoELayer whose router may be told which experts to take."""

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
        return self.postprocess(self.combine(output), shared)
