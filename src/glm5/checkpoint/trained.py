"""Which tensors of a model its checkpoint holds: all of them, or the adapters on a frozen base."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel

from glm5.lora.attach import is_adapter


def sharded_trained(model: GPTModel) -> dict[str, Any]:
    """Megatron's sharded tensors of what the checkpoint of this model holds."""
    sharded = model.sharded_state_dict()
    adapters = {name: value for name, value in sharded.items() if is_adapter(name)}
    return adapters or sharded


def load_trained(model: GPTModel, tensors: dict[str, Any]) -> None:
    """Puts loaded tensors into the model; under adapters the base is left as it is."""
    model.load_state_dict(tensors, strict=not any(is_adapter(name) for name in tensors))
