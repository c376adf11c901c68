"""Megatron-Core's configuration of a GLM-5 model, derived from one `Glm5Config`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig

from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.model.layout import check_layout
from glm5.model.schedule import pipeline_layout
from glm5.ops.backends import get_backend
from glm5.runtime.distributed import Layout

Recompute = Literal["none", "selective", "full"]
AttentionParallel = Literal["tokens", "heads"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SELECTIVE_MODULES = ("core_attn", "mlp", "moe")


@dataclass
class Glm5TransformerConfig(MLATransformerConfig):
    """Megatron-Core's config plus what its own fields cannot say."""

    glm5: Glm5Config = field(kw_only=True)
    """The model as published; dimensions and the layer schedule are read from it."""

    dsa_attention_backend: str = "torch"
    """Name of the backend (glm5.ops.backends) that runs the indexer and the sparse attention."""

    attention_parallel: AttentionParallel = "tokens"
    """What tensor-parallel ranks share in the attention core and the indexer."""

    indexer_loss_coeff: float = 0.0
    """Weight of the indexer's KL loss; 0 runs the indexer without gradients."""

    deterministic_attention: bool = False
    """Whether the attention's gradients have the same bits every time."""

    @property
    def shares_queries(self) -> bool:
        """Whether a rank attends for its share of the queries with all heads."""
        return self.attention_parallel == "tokens" and self.tensor_model_parallel_size > 1


def build_device(config: MLATransformerConfig) -> torch.device:
    """Where modules built from `config` put their parameters; meta: shapes without memory."""
    if config.init_model_with_meta_device:
        return torch.device("meta")
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def glm5_transformer_config(
    glm5: Glm5Config,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    layout: Layout,
    recompute: Recompute = "none",
    indexer_loss_coeff: float = 0.0,
    deterministic_attention: bool = False,
    include_mtp: bool = False,
    layers_per_stage: Sequence[int] | None = None,
    attention_parallel: AttentionParallel = "tokens",
) -> Glm5TransformerConfig:
    """Translates the published configuration into Megatron-Core's.

    `layers_per_stage` says how many layers stand on each of the layout's pp * vpp pipeline stages,
    in the model's order: stage i is on rank i mod pp. By default the most even split that
    IndexShare allows.

    Raises:
        BackendError: `backend` is unknown or cannot run here.
        ConfigError: `recompute` or `attention_parallel` is unknown, or `indexer_loss_coeff` is
        negative or no number.
        LayoutError: the model cannot be split as the layout or `layers_per_stage` says.
    """
    get_backend(backend)
    if not (indexer_loss_coeff >= 0 and math.isfinite(indexer_loss_coeff)):
        raise ConfigError(
            "indexer_loss_coeff is no weight", got=indexer_loss_coeff, expected="a number from 0 up"
        )
    if attention_parallel not in get_args(AttentionParallel):
        raise ConfigError(
            "unknown kind of attention_parallel",
            got=repr(attention_parallel),
            expected=", ".join(get_args(AttentionParallel)),
        )
    check_layout(glm5, layout)
    stages = pipeline_layout(glm5, layout.pp * layout.vpp, layers_per_stage, mtp=include_mtp)
    return Glm5TransformerConfig(
        glm5=glm5,
        dsa_attention_backend=backend,
        attention_parallel=attention_parallel,
        indexer_loss_coeff=indexer_loss_coeff,
        deterministic_attention=deterministic_attention,
        **_dimensions(glm5),
        **_experts(glm5, device, layout),
        **_recompute(recompute),
        **_execution(device, dtype, layout),
        # Megatron takes a list of one stage for a split
        pipeline_model_parallel_layout=stages if layout.pp > 1 else None,
        mtp_num_layers=glm5.num_nextn_predict_layers if include_mtp else None,
    )


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The torch dtype of a name, if a model can be built in it; ConfigError otherwise."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ConfigError(
        "this dtype is not supported",
        got=dtype,
        expected=", ".join(DTYPES),
        remedy="pass dtype='bfloat16'",
    )


def _dimensions(glm5: Glm5Config) -> dict[str, object]:
    return {
        "num_layers": glm5.num_hidden_layers,
        "hidden_size": glm5.hidden_size,
        "ffn_hidden_size": glm5.intermediate_size,
        "num_attention_heads": glm5.num_attention_heads,
        "q_lora_rank": glm5.q_lora_rank,
        "kv_lora_rank": glm5.kv_lora_rank,
        # Megatron's qk_head_dim is the part without positions
        "qk_head_dim": glm5.qk_nope_head_dim,
        "qk_pos_emb_head_dim": glm5.qk_rope_head_dim,
        "v_head_dim": glm5.v_head_dim,
        "rope_type": "rope",
        "rotary_base": glm5.rope_theta,
        "layernorm_epsilon": glm5.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _experts(glm5: Glm5Config, device: torch.device, layout: Layout) -> dict[str, object]:
    return {
        "num_moe_experts": glm5.n_routed_experts,
        "moe_layer_freq": [int(kind == "sparse") for kind in glm5.mlp_layer_types],
        "moe_ffn_hidden_size": glm5.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": glm5.n_shared_experts * glm5.moe_intermediate_size,
        # under overlap the shared expert's reduction happens outside its linear, and an adapter on
        # it would be counted once per tensor-parallel rank
        "moe_shared_expert_overlap": False,
        "moe_router_topk": glm5.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # the published bias is kept: fine-tuning must not drift it
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": glm5.routed_scaling_factor,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        # Megatron's alltoall dispatcher splits by CUDA tensors
        "moe_token_dispatcher_type": "allgather" if device.type == "cpu" else "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
    }


def _recompute(recompute: Recompute) -> dict[str, object]:
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(SELECTIVE_MODULES),
        }
    if recompute != "none":
        raise ConfigError(
            "unknown kind of recompute",
            got=repr(recompute),
            expected=", ".join(get_args(Recompute)),
        )
    return {}


def _execution(device: torch.device, dtype: torch.dtype, layout: Layout) -> dict[str, object]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": device.type != "cuda",
        "init_model_with_meta_device": device.type == "meta",
        # every parameter is loaded, and loading checks that every parameter was
        "perform_initialization": False,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        # of two pipeline ranks each is before and after the other, and in one batch of messages
        # activations and gradients between them are taken for one another
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "context_parallel_size": layout.cp,
        "expert_tensor_parallel_size": layout.etp,
        # experts need it beside tensor parallelism
        "sequence_parallel": layout.tp > 1,
        # gradients are averaged over the trained tokens of the whole batch, not per micro-batch
        "calculate_per_token_loss": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "transformer_impl": "local",
    }
