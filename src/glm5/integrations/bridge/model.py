"""The GPTModel that Megatron-Bridge gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.bridge.peft import walk_utils
from megatron.bridge.peft.base import PEFT
from torch import nn

from glm5.integrations.bridge.lora import TransformOurs
from glm5.model.mtp import Glm5Model


class BridgedModel(Glm5Model):
    """Our model, which says how Megatron-Bridge's adapters go on it."""

    def map(self, func: Callable[..., nn.Module], leaf_only: bool = False, **place: Any) -> Any:
        """Megatron-Bridge's hook for modules that are walked through in their own way.

        It calls this for everything that it does to all modules; only putting adapters on them is
        done otherwise. `place` says where the model is.
        """
        peft = getattr(func, "__self__", None)
        if isinstance(peft, PEFT) and func.__name__ == "transform":
            func = TransformOurs(self, peft)
        return walk_utils.map(self, func, leaf_only=leaf_only, _skip_map=True, **place)
