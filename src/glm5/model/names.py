"""Global names of modules and tensors, whatever this rank holds of the model."""

from __future__ import annotations

import re

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


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
