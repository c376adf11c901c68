"""Says which module stands where in a GLM-5 GPTModel."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from glm5.model.attention import DSASelfAttention, IndexerType
from glm5.model.layer import Glm5TransformerLayer
from glm5.model.mlp import DenseMLP
from glm5.model.moe import Glm5MoELayer
from glm5.model.mtp import Glm5MtpLayer
from glm5.model.norm import RMSNorm
from glm5.model.transformer_config import Glm5TransformerConfig


def decoder_spec(
    config: Glm5TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """One layer spec per layer of this stage, following indexer_types and mlp_layer_types."""
    glm5 = config.glm5
    kinds = list(zip(glm5.indexer_types, glm5.mlp_layer_types, strict=True))
    first = get_transformer_layer_offset(config, vp_stage)
    here = kinds[first : first + get_num_layers_to_build(config, vp_stage)]
    layers = [_layer_spec(indexer_type, sparse=mlp == "sparse") for indexer_type, mlp in here]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def mtp_spec(config: Glm5TransformerConfig) -> ModuleSpec:
    """Multi-token prediction: every MTP layer has an indexer of its own and experts."""
    layer = ModuleSpec(
        module=Glm5MtpLayer,
        params={"decoder_layer": _layer_spec("full", sparse=True, of_mtp=True)},
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[layer] * config.glm5.num_nextn_predict_layers
        ),
    )


def _layer_spec(indexer_type: IndexerType, *, sparse: bool, of_mtp: bool = False) -> ModuleSpec:
    return ModuleSpec(
        module=Glm5TransformerLayer,
        params={"of_mtp": of_mtp},
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=DSASelfAttention, params={"indexer_type": indexer_type}
            ),
            pre_mlp_layernorm=RMSNorm,
            mlp=Glm5MoELayer if sparse else DenseMLP,
            mlp_bda=get_bias_dropout_add,
        ),
    )
