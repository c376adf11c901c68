"""Puts adapters on a model, and finds them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.errors import AdapterError
from glm5.lora.absorbed import AbsorbedLora
from glm5.lora.dropout import LoraDropout, own_tokens, tokens_of_experts
from glm5.lora.experts import GroupedLora, expert_pair
from glm5.lora.factors import Adapted, Factors, linear_pair
from glm5.lora.linear import LoraLinear
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import TargetModule, find_targets
from glm5.model.experts import GroupedLinear
from glm5.model.linear import AbsorbedProjection
from glm5.model.names import GlobalNames


def attach_lora(chunks: GPTModel | Sequence[GPTModel], spec: LoraSpec, *, seed: int) -> None:
    """Freezes a model, or a rank's stages of one, and puts a trainable pair on every target.

    Logits are unchanged at first. Collective.

    Raises:
        AdapterError: a setting means nothing in this model; see `find_targets`.
    """
    stages = [chunks] if isinstance(chunks, GPTModel) else list(chunks)
    for model, targets in zip(stages, find_targets(stages, spec), strict=True):
        _attach(model, targets, spec, seed)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """(path, module) of everything that carries adapters, in model order."""
    for path, module in model.named_modules():
        if isinstance(module, Adapted):
            yield path, module


def adapter_pairs(model: nn.Module) -> Iterator[tuple[str, str, Factors]]:
    """(path of the Megatron linear, Hugging Face linear, factors) of every adapter, in order.

    Experts one by one, by the paths that the conversion rules know.
    """
    for path, module in adapted_modules(model):
        yield from module.factors(path)


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(".base.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter of an adapted model belongs to an adapter."""
    return ".pairs." in name


def adapted_type(base: nn.Module) -> type[Adapted]:
    """The class that carries the adapters of a linear of the model."""
    if isinstance(base, GroupedLinear):
        return GroupedLora
    return AbsorbedLora if isinstance(base, AbsorbedProjection) else LoraLinear


def _attach(model: GPTModel, targets: Sequence[TargetModule], spec: LoraSpec, seed: int) -> None:
    model.requires_grad_(False)
    for target in targets:
        parent, _, leaf = target.path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _adapt(target, spec))
    names = GlobalNames(model)
    for path, adapted in adapted_modules(model):
        adapted.initialise(seed, path, names)
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding):
            module.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(embedding: nn.Module, args: Any, output: Tensor) -> None:
    """Megatron's recompute drops the gradients of a region none of whose inputs asks for one."""
    if embedding.training and torch.is_grad_enabled():
        output.requires_grad_()


def _adapt(target: TargetModule, spec: LoraSpec) -> Adapted:
    base, count = target.module, len(target.hf_linears)
    if isinstance(base, GroupedLinear):
        outer = spec.expert_lora == "shared_outer"
        stacked = {
            name: expert_pair(pair, base, count, shares_outer=outer)
            for name, pair in target.pairs.items()
        }
        # ranks that share the outputs of an expert have the same inputs
        holder = tokens_of_experts() if base.split == "column" else own_tokens()
        return GroupedLora(base, target.hf_linears, stacked, _dropout(spec, holder))
    if not hasattr(base, "weight"):
        raise AdapterError(
            f"{target.path} is no linear that can be adapted",
            got=type(base).__name__,
            expected="a linear of the model, without an adapter of another library",
            remedy="attach one of the two: glm5's adapters, or the other ones",
        )
    kind = adapted_type(base)
    pairs = {name: linear_pair(pair, base, count) for name, pair in target.pairs.items()}
    return kind(base, target.hf_linears, pairs, _dropout(spec, own_tokens()))


def _dropout(spec: LoraSpec, holder: str) -> LoraDropout | None:
    return LoraDropout(spec.dropout, holder) if spec.dropout else None
