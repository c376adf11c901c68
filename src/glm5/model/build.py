"""Builds this rank's part of the GPTModel of a GLM-5 configuration, without weights."""

from __future__ import annotations

from contextlib import nullcontext

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from glm5.model.spec import decoder_spec, mtp_spec
from glm5.model.transformer_config import Glm5TransformerConfig, build_device


def build_model(config: Glm5TransformerConfig) -> GPTModel:
    """An uninitialised GPTModel, or this pipeline stage of it, on this rank's device."""
    glm5, device = config.glm5, build_device(config)
    # without memory of its own nothing may be made elsewhere first
    with device if device.type == "meta" else nullcontext():
        model = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec(config),
            vocab_size=glm5.vocab_size,
            max_sequence_length=glm5.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            # the attention layer applies its own rope
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec(config) if config.mtp_num_layers else None,
        )
    # Megatron makes the routers on the CPU and moves them in their first forward
    return model.to(device)
