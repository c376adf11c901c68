"""Builds this rank's part of the GPTModel of a GLM-5 configuration, without weights."""

from __future__ import annotations

from contextlib import nullcontext

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from glm5.model.mtp import Glm5Model
from glm5.model.spec import decoder_spec, mtp_spec
from glm5.model.transformer_config import Glm5TransformerConfig, build_device


def build_chunks(config: Glm5TransformerConfig) -> list[GPTModel]:
    """This rank's uninitialised pipeline stages, on its device: one, or several if interleaved."""
    count = config.virtual_pipeline_model_parallel_size
    return [_build(config, vp_stage) for vp_stage in ([None] if count is None else range(count))]


def _build(config: Glm5TransformerConfig, vp_stage: int | None) -> GPTModel:
    glm5, device = config.glm5, build_device(config)
    position = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    # without memory of its own nothing may be made elsewhere first
    with device if device.type == "meta" else nullcontext():
        model = Glm5Model(
            config=config,
            transformer_layer_spec=decoder_spec(config, vp_stage),
            vocab_size=glm5.vocab_size,
            max_sequence_length=glm5.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**position),
            post_process=parallel_state.is_pipeline_last_stage(**position),
            # the attention layer applies its own rope
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec(config) if config.mtp_num_layers else None,
            vp_stage=vp_stage,
        )
    # Megatron makes the routers on the CPU and moves them in their first forward
    return model.to(device)
