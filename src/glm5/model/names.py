"""Global names of modules and tensors, whatever this rank holds of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_STACKED = re.compile(r"\.mlp\.experts\.(?=linear_fc[12]\b)")


class GlobalNames:
    """Numbers layers over pipeline stages and experts over expert-parallel ranks."""

    def __init__(self, model: GPTModel) -> None:
        config = model.config
        ranks = parallel_state.get_expert_model_parallel_world_size()
        self._first_layer = get_transformer_layer_offset(config, model.vp_stage)
        self._first_expert = (
            parallel_state.get_expert_model_parallel_rank() * config.num_moe_experts // ranks
        )

    def __call__(self, local: str) -> str:
        """`decoder.layers.0.mlp.experts.local_experts.0.x` -> the same with global numbers."""
        name = _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + self._first_layer}.", local)
        return _EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + self._first_expert}.", name)


def is_stacked(name: str) -> bool:
    """Whether a module or tensor is that of all local experts of a layer."""
    return _STACKED.search(name) is not None


def expert_name(name: str, expert: int) -> str:
    """`...mlp.experts.linear_fc1.x` -> `...mlp.experts.local_experts.0.linear_fc1.x`."""
    return _STACKED.sub(f".mlp.experts.local_experts.{expert}.", name)


def by_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor as the conversion rules know it: stacked experts one by one, all else as it is.

    Experts are views without gradients, through which one can write; each says how it is cut.
    """
    if not is_stacked(name):
        yield name, tensor
        return
    for expert, view in enumerate(tensor.detach()):
        if getattr(tensor, "tensor_model_parallel", False):
            cut = cast(Any, tensor)
            set_tensor_model_parallel_attributes(
                view, True, cut.partition_dim - 1, cut.partition_stride
            )
        yield expert_name(name, expert), view
