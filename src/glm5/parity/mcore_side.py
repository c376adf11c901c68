"""Observes the Megatron-Core model on packed (thd) or batched (bshd) tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.model.forward import logits
from glm5.model.indexer import LightningIndexer
from glm5.model.layer import Glm5TransformerLayer
from glm5.model.names import by_expert
from glm5.ops.indexer.reference import index_scores
from glm5.parity.observation import Observation, next_token_loss


def observe_mcore(
    model: GPTModel,
    token_ids: Tensor,
    lengths: Sequence[int],
    *,
    batched: bool = False,
    gradients: bool = True,
) -> Observation:
    """One forward and backward of all documents together; `batched` needs equal lengths."""
    model.zero_grad(set_to_none=True)
    seen = Observation(logits=token_ids)
    handles = [handle for layer in model.decoder.layers for handle in _layer_hooks(layer, seen)]
    _observe_indexers(model, True)
    try:
        seen.logits = _run(model, token_ids, lengths, batched)
    finally:
        for handle in handles:
            handle.remove()
        _observe_indexers(model, False)
    seen.hidden = {layer: _flat(hidden) for layer, hidden in seen.hidden.items()}
    if gradients:
        next_token_loss(seen.logits, token_ids, lengths).backward()
        seen.gradients = _hf_gradients(model)
    seen.logits = seen.logits.detach()
    return seen


def _run(model: GPTModel, token_ids: Tensor, lengths: Sequence[int], batched: bool) -> Tensor:
    if not batched:
        edges = torch.tensor([0, *lengths]).cumsum(0)
        return logits(model, token_ids, edges)
    assert len(set(lengths)) == 1, f"a batch has documents of one length, got {lengths}"
    rows = token_ids.view(len(lengths), -1)
    positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    return model(rows, positions, attention_mask=None).flatten(0, 1)


def _observe_indexers(model: GPTModel, observed: bool) -> None:
    for layer in model.decoder.layers:
        if layer.self_attention.indexer is not None:
            layer.self_attention.indexer.observed = observed


def _layer_hooks(layer: Glm5TransformerLayer, seen: Observation) -> list[Any]:
    index = layer.layer_number - 1

    def hidden_hook(module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        seen.hidden[index] = output[0].detach()

    def indexer_hook(module: LightningIndexer, args: Any, output: Any) -> None:
        topk_indices, inputs = output
        seen.selected[index] = topk_indices
        seen.scores[index] = index_scores(inputs.q, inputs.k, inputs.weights).detach()

    handles = [layer.register_forward_hook(hidden_hook)]
    if layer.self_attention.indexer is not None:
        handles.append(layer.self_attention.indexer.register_forward_hook(indexer_hook))
    return handles


def _flat(hidden: Tensor) -> Tensor:
    """[s, b, d] -> [b * s, d]."""
    return hidden.transpose(0, 1).flatten(0, 1)


def _hf_gradients(model: GPTModel) -> dict[str, Tensor]:
    """Gradients under the checkpoint's names: a gradient is cut and joined as its weight is."""
    by_name = {
        one: gradient
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        for one, gradient in by_expert(name, parameter.grad)
    }
    gradients: dict[str, Tensor] = {}
    for rule in glm5_rules(model.config.glm5, include_mtp=False):
        gradient = by_name.get(rule.mcore_name)
        if gradient is not None:
            gradients.update(zip(rule.hf_names, rule.to_hf(gradient), strict=True))
    return gradients
