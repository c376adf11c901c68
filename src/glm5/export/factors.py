"""The adapters of a Megatron-Core model under the names of the Hugging Face linears."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.adapter import is_expert
from glm5.checkpoint.adapter_io import LoraAdapter, LoraFactors
from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules
from glm5.lora.attach import adapter_pairs


def trained_adapter(model: GPTModel, dtype: torch.dtype) -> LoraAdapter:
    """Every adapter of the model, a [rank, in] and b [out, rank] in `dtype`."""
    linears = hf_modules(glm5_rules(model.config.glm5, include_mtp=False))
    factors: dict[str, LoraFactors] = {}
    for path, hf_linear, pair in adapter_pairs(model):
        (hf_path,) = (name for name in linears[path] if name.rpartition(".")[2] == hf_linear)
        a, b = (factor.detach().to(dtype) for factor in (pair.a, pair.b))
        factors[hf_path] = LoraFactors(a, b, pair.scale)
    has_experts = any(is_expert(path) for path in factors)
    return LoraAdapter(factors, "per_expert" if has_experts else "none")
