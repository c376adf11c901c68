"""Fresh weights for a model that no checkpoint fills."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from torch import nn

from glm5.model.experts import GroupedLinear
from glm5.model.linear import ReplicatedLinear


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Draws the weights of our own linears; Megatron has drawn those of its linears.

    A whole weight is drawn from the generator that tensor-parallel ranks share, a cut expert from
    the rank's own.
    """
    config: Any = model.config
    for module in model.modules():
        if isinstance(module, ReplicatedLinear):
            config.init_method(module.weight)
        if isinstance(module, GroupedLinear):
            draw = (
                config.init_method
                if module.split == "column"
                else (config.output_layer_init_method)
            )
            with _own_generator():
                draw(module.weight)


def _own_generator() -> Any:
    tracker = get_cuda_rng_tracker()
    name = get_expert_parallel_rng_tracker_name()
    return tracker.fork(name) if tracker.is_initialized() else nullcontext()
