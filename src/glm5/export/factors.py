"""The adapters of a Megatron-Core model under the names of the Hugging Face linears."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.adapter_io import LoraFactors
from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules
from glm5.lora.attach import adapter_pairs


def adapter_factors(model: GPTModel, dtype: torch.dtype) -> dict[str, LoraFactors]:
    """(a [rank, in], b [out, rank]) of every adapter, by the path of its Hugging Face linear."""
    linears = hf_modules(glm5_rules(model.config.glm5, include_mtp=False))
    factors: dict[str, LoraFactors] = {}
    for path, hf_linear, pair in adapter_pairs(model):
        (hf_path,) = (name for name in linears[path] if name.rpartition(".")[2] == hf_linear)
        factors[hf_path] = LoraFactors(pair.a.detach().to(dtype), pair.b.detach().to(dtype))
    return factors
