"""The tensors of a model that Megatron-Bridge has made, and perhaps adapted, by global name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.checkpoint.convert import EXPERT_BIAS
from glm5.lora.attach import base_name, is_adapter
from glm5.model.names import GlobalNames, by_expert

# How Megatron-Bridge names a linear that it has wrapped, and the adapter beside it.
WRAPPED, ADAPTER = ".to_wrap.", ".adapter."


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that this rank holds, or its part of it; of stacked experts a view."""

    tensor: Tensor
    module: nn.Module
    """What has it as a parameter or buffer."""
    local_name: str
    chunk: int
    """Number of the pipeline stage among the rank's own."""
    wrapped: bool
    """Whether Megatron-Bridge has put an adapter on the module."""


def held_tensors(chunks: Sequence[GPTModel]) -> dict[str, Held]:
    """What a checkpoint holds of this rank's stages, by the names that the rules know.

    Experts one by one, as views through which one can write; adapters are left out.
    """
    found: dict[str, Held] = {}
    for chunk, model in enumerate(chunks):
        global_name = GlobalNames(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not _is_of_checkpoint(name, tensor):
                continue
            module = model.get_submodule(name.rpartition(".")[0])
            plain = base_name(name).replace(WRAPPED, ".")
            for one, view in by_expert(plain, tensor):
                found[global_name(one)] = Held(view, module, name, chunk, WRAPPED in name)
    return found


def _is_of_checkpoint(name: str, tensor: Any) -> bool:
    if is_adapter(name) or ADAPTER in name:
        return False
    return isinstance(tensor, nn.Parameter) or name.endswith(EXPERT_BIAS)
