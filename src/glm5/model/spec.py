"""Says which module stands where in a GLM-5 GPTModel."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
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
from glm5.model.experts import GroupedExperts
from glm5.model.layer import Glm5TransformerLayer
from glm5.model.moe import Glm5MoELayer, Glm5Router
from glm5.model.mtp import Glm5MtpLayer
from glm5.model.norm import RMSNorm
from glm5.model.transformer_config import Glm5TransformerConfig

_MLP = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


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
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            layer_norm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=_layer_spec("full", sparse=True),
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[layer] * config.glm5.num_nextn_predict_layers
        ),
    )


def _layer_spec(indexer_type: IndexerType, *, sparse: bool) -> ModuleSpec:
    return ModuleSpec(
        module=Glm5TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=DSASelfAttention,
                # Megatron's MTP layer refuses attention whose mask type it cannot read here
                params={"indexer_type": indexer_type, "attn_mask_type": AttnMaskType.causal},
            ),
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe_builder() if sparse else partial(MLP.as_mlp_submodule, submodules=_MLP),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe_builder() -> partial[Glm5MoELayer]:
    return partial(
        Glm5MoELayer,
        submodules=MoESubmodules(
            experts=GroupedExperts,
            shared_experts=partial(SharedExpertMLP, submodules=_MLP),
            router=Glm5Router,
        ),
    )
