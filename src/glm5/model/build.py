"""Builds the Megatron-Core GPTModel of a GLM-5 configuration, without weights."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel

from glm5.errors import LayoutError
from glm5.model.spec import decoder_spec, mtp_spec
from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.runtime.distributed import current_layout


def build_model(config: Glm5TransformerConfig) -> GPTModel:
    """An uninitialised GPTModel on this rank's device; loading fills and checks every tensor.

    Raises:
        LayoutError: the initialised parallel state splits the model.
    """
    _check_layout()
    glm5 = config.glm5
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config),
        vocab_size=glm5.vocab_size,
        max_sequence_length=glm5.max_position_embeddings,
        # the attention layer applies its own rope
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp_spec(config) if config.mtp_num_layers else None,
    )
    # Megatron makes the routers on the CPU and moves them in their first forward
    return model.to(build_device(config))


def _check_layout() -> None:
    layout = current_layout()
    if (layout.tp, layout.pp, layout.cp, layout.ep) != (1, 1, 1, 1):
        raise LayoutError(
            "the model is not split over processes yet",
            got=layout,
            expected="tp = pp = cp = ep = 1 (data parallelism is free)",
            remedy="start Megatron's parallel state with model-parallel sizes of 1",
        )
