"""Builds this rank's part of the GPTModel of a GLM-5 configuration, without weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from glm5.model.mtp import Glm5Model
from glm5.model.spec import decoder_spec, mtp_spec
from glm5.model.transformer_config import Glm5TransformerConfig, build_device


def build_chunks(config: Glm5TransformerConfig) -> list[GPTModel]:
    """This rank's uninitialised pipeline stages, on its device: one, or several if interleaved."""
    count = config.virtual_pipeline_model_parallel_size
    stages = [None] if count is None else range(count)
    return [build_stage(config, vp_stage) for vp_stage in stages]


def build_stage(
    config: Glm5TransformerConfig,
    vp_stage: int | None,
    *,
    model_type: type[Glm5Model] = Glm5Model,
    decoder: Callable[..., Any] = decoder_spec,
    pre_process: bool | None = None,
    post_process: bool | None = None,
) -> Glm5Model:
    """One pipeline stage; whether it has the embedding or the head follows from its place."""
    glm5, device = config.glm5, build_device(config)
    position = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    if pre_process is None:
        pre_process = parallel_state.is_pipeline_first_stage(**position)
    if post_process is None:
        post_process = parallel_state.is_pipeline_last_stage(**position)
    # without memory of its own nothing may be made elsewhere first
    with device if device.type == "meta" else nullcontext():
        model = model_type(
            config=config,
            transformer_layer_spec=decoder(config, vp_stage=vp_stage),
            vocab_size=glm5.vocab_size,
            max_sequence_length=glm5.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            # the attention layer applies its own rope
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec(config) if config.mtp_num_layers and post_process else None,
            vp_stage=vp_stage,
        )
    # Megatron makes the routers on the CPU and moves them in their first forward
    return model.to(device)
