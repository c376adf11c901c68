"""The adapters of a Megatron-Core model under the names of the Hugging Face linears."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraAdapter, LoraFactors
from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules
from glm5.checkpoint.trained import trained_modules
from glm5.lora.attach import adapted_modules, adapter_pairs
from glm5.lora.experts import GroupedLora
from glm5.lora.spec import ExpertLora


def trained_adapter(model: GPTModel, dtype: torch.dtype) -> LoraAdapter:
    """Every adapter of the model, a [rank, in] and b [out, rank], and the whole parameters that
    train beside them, all in `dtype`. A factor that experts share is one tensor."""
    linears = hf_modules(glm5_rules(model.config.glm5, include_mtp=False))
    converted: dict[tuple[int, torch.Size], Tensor] = {}

    def convert(factor: Tensor) -> Tensor:
        place = (factor.data_ptr(), factor.shape)
        if place not in converted:
            converted[place] = factor.detach().to(dtype)
        return converted[place]

    factors: dict[str, LoraFactors] = {}
    for path, hf_linear, pair in adapter_pairs(model):
        (hf_path,) = (name for name in linears[path] if name.rpartition(".")[2] == hf_linear)
        factors[hf_path] = LoraFactors(convert(pair.a), convert(pair.b), pair.scale)
    # what did not train keeps the dtype that it was read in
    modules = {
        name: tensor.detach().to(dtype) if tensor.requires_grad else tensor
        for name, tensor in trained_modules(model).items()
    }
    return LoraAdapter(factors, _expert_lora(model), modules)


def _expert_lora(model: GPTModel) -> ExpertLora:
    grouped = [module for _, module in adapted_modules(model) if isinstance(module, GroupedLora)]
    if not grouped:
        return "none"
    return "shared_outer" if any(module.shares_factors for module in grouped) else "per_expert"
