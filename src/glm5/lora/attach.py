"""Puts adapters on a model, and finds them again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.lora.absorbed import AbsorbedLora
from glm5.lora.factors import Adapted, LoraPair
from glm5.lora.linear import LoraLinear
from glm5.lora.targets import TargetModule, find_targets
from glm5.model.linear import LatentUpProjection
from glm5.model.names import GlobalNames


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which linears are adapted and how; delta W = alpha / rank * B A."""

    adapter_rank: int
    adapter_alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.adapter_alpha / self.adapter_rank


def attach_lora(model: GPTModel, spec: LoraSpec, *, seed: int) -> None:
    """Freezes the model and puts a trainable pair on every target; logits are unchanged at first.

    Raises:
        AdapterError: a target is unknown or matches nothing.
    """
    targets = find_targets(model, spec.targets)
    model.requires_grad_(False)
    for target in targets:
        parent, _, leaf = target.path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _adapt(target, spec))
    global_name = GlobalNames(model)
    for path, adapted in adapted_modules(model):
        adapted.initialise(seed, global_name(f"{path}.").removesuffix("."))
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding):
            module.register_forward_hook(_ask_for_gradient)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """(path, module) of everything that carries adapters, in model order."""
    for path, module in model.named_modules():
        if isinstance(module, Adapted):
            yield path, module


def adapter_pairs(model: nn.Module) -> Iterator[tuple[str, str, LoraPair]]:
    """(path of the adapted module, Hugging Face linear, pair) of every adapter, in model order."""
    for path, module in adapted_modules(model):
        for hf_linear in module.pairs:
            yield path, hf_linear, module.pair(hf_linear)


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(".base.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter of an adapted model belongs to an adapter."""
    return ".pairs." in name


def _ask_for_gradient(embedding: nn.Module, args: Any, output: Tensor) -> None:
    """Megatron's recompute drops the gradients of a region none of whose inputs asks for one."""
    if embedding.training and torch.is_grad_enabled():
        output.requires_grad_()


def _adapt(target: TargetModule, spec: LoraSpec) -> Adapted:
    kind = AbsorbedLora if isinstance(target.module, LatentUpProjection) else LoraLinear
    return kind(
        target.module,
        target.hf_linears,
        target.wanted,
        rank=spec.adapter_rank,
        scale=spec.scale,
    )
