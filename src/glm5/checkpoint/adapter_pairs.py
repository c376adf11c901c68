"""The adapters of a rank's part of a model, under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules
from glm5.lora.attach import adapted_modules
from glm5.lora.factors import Adapted, Factors
from glm5.model.names import GlobalNames


def local_pairs(model: GPTModel) -> Iterator[tuple[str, Adapted, Factors]]:
    """(Hugging Face path, its module, this rank's part of its pair) of every adapter."""
    global_name = GlobalNames(model)
    linears = hf_modules(glm5_rules(model.config.glm5, include_mtp=False))
    for path, module in adapted_modules(model):
        for local, hf_linear, pair in module.factors(path):
            paths = linears[global_name(local)]
            (hf_path,) = (name for name in paths if name.rpartition(".")[2] == hf_linear)
            yield hf_path, module, pair
