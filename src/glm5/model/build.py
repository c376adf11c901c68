"""Builds this rank's part of the GPTModel of a GLM-5 configuration, without weights."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from glm5.errors import LayoutError
from glm5.model.spec import decoder_spec, mtp_spec
from glm5.model.transformer_config import Glm5TransformerConfig, build_device


def build_model(config: Glm5TransformerConfig) -> GPTModel:
    """An uninitialised GPTModel, or this pipeline stage of it, on this rank's device.

    Raises:
        LayoutError: the parallel sizes do not divide the model.
    """
    check_layout(config)
    glm5 = config.glm5
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
    return model.to(build_device(config))


def check_layout(config: Glm5TransformerConfig) -> None:
    """Everything about a layout that can be known before a parameter is made.

    Raises:
        LayoutError: a size does not divide what it splits, or two features exclude each other.
    """
    glm5 = config.glm5
    tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
    split = {
        "num_attention_heads": (glm5.num_attention_heads, tp),
        "vocab_size": (glm5.vocab_size, tp),
        "intermediate_size": (glm5.intermediate_size, tp),
        "moe_intermediate_size x n_shared_experts": (
            glm5.moe_intermediate_size * glm5.n_shared_experts,
            tp,
        ),
        "n_routed_experts": (glm5.n_routed_experts, ep),
    }
    for name, (size, ranks) in split.items():
        if size % ranks:
            raise LayoutError(
                f"{name} does not divide over the ranks",
                got=f"{size} over {ranks}",
                expected="a multiple of the number of ranks",
                remedy="choose another tp or ep",
            )
    if config.indexer_loss_coeff > 0 and tp > 1:
        raise LayoutError(
            "the indexer's loss needs the attention of all heads",
            got=f"indexer_loss_coeff {config.indexer_loss_coeff} with tp {tp}",
            expected="tp 1 where the indexer trains",
            remedy="freeze the indexer, or set tp to 1",
        )
    if config.mtp_num_layers and (config.context_parallel_size > 1 or tp > 1):
        raise LayoutError(
            "the MTP layer is built with tp = cp = 1 only",
            got=f"tp {tp}, cp {config.context_parallel_size}",
            remedy="leave the MTP layer out",
        )
