"""Megatron-Core's configuration of a GLM-5 model, derived from one `Glm5Config`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

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
BaseWeights = Literal["dtype", "fp8"]

DEFAULT_FP8_TRANSIENT_MIB = 64

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SELECTIVE_MODULES = ("core_attn", "mlp", "moe")


@dataclass(kw_only=True)
class Glm5Settings:
    """What our modules read from a Megatron-Core config beside its own fields and `glm5`."""

    dsa_attention_backend: str = "torch"
    """Name of the backend (glm5.ops.backends) that runs the indexer and the sparse attention."""

    attention_parallel: AttentionParallel = "tokens"
    """What tensor-parallel ranks share in the attention core and the indexer."""

    indexer_loss_coeff: float = 0.0
    """Weight of the indexer's KL loss; 0 runs the indexer without gradients."""

    deterministic_attention: bool = False
    """Whether the attention's gradients have the same bits every time."""

    base_weights: BaseWeights = "dtype"
    """fp8: what an FP8 release quantises is held so and never trains; dtype: as everything else."""

    fp8_compute: bool = False
    """Whether frozen float8 weights are multiplied in float8, with the activations quantised."""

    fp8_transient_mib: int = DEFAULT_FP8_TRANSIENT_MIB
    """How much of a float8 `kv_b_proj` is dequantised at a time, with what that takes [MiB]."""

    @property
    def shares_queries(self) -> bool:
        """Whether a rank attends for its share of the queries with all heads."""
        size = self.tensor_model_parallel_size  # type: ignore[attr-defined] # Megatron's own field
        return self.attention_parallel == "tokens" and bool(size > 1)


@dataclass
class Glm5TransformerConfig(Glm5Settings, MLATransformerConfig):
    """Megatron-Core's config plus what its own fields cannot say."""

    glm5: Glm5Config = field(kw_only=True)
    """The model as published; dimensions and the layer schedule are read from it."""


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
    base_weights: BaseWeights = "dtype",
    fp8_compute: bool = False,
    fp8_transient_mib: int = DEFAULT_FP8_TRANSIENT_MIB,
) -> Glm5TransformerConfig:
    """Translates the published configuration into Megatron-Core's.

    `layers_per_stage` says how many layers stand on each of the layout's pp * vpp pipeline stages,
    in the model's order: stage i is on rank i mod pp. By default the most even split that
    IndexShare allows.

    Raises:
        BackendError: `backend` is unknown or cannot run here.
        ConfigError: `recompute`, `attention_parallel` or `base_weights` is unknown,
        `indexer_loss_coeff` is negative or no number, or a setting of FP8 weights has no meaning.
        LayoutError: the model cannot be split as the layout or `layers_per_stage` says.
    """
    settings = Glm5Settings(
        dsa_attention_backend=backend,
        attention_parallel=attention_parallel,
        indexer_loss_coeff=indexer_loss_coeff,
        deterministic_attention=deterministic_attention,
        base_weights=base_weights,
        fp8_compute=fp8_compute,
        fp8_transient_mib=fp8_transient_mib,
    )
    check_settings(settings)
    check_layout(glm5, layout)
    stages = pipeline_layout(glm5, layout.pp * layout.vpp, layers_per_stage, mtp=include_mtp)
    return Glm5TransformerConfig(
        glm5=glm5,
        **asdict(settings),
        **architecture(glm5),
        **router_choices(device),
        **_recompute(recompute),
        **_execution(device, dtype, layout),
        # Megatron takes a list of one stage for a split
        pipeline_model_parallel_layout=stages if layout.pp > 1 else None,
        mtp_num_layers=glm5.num_nextn_predict_layers if include_mtp else None,
    )


def check_settings(settings: Glm5Settings) -> None:
    """Checks each by itself.

    Raises:
        BackendError: the backend is unknown or cannot run here.
        ConfigError: another setting has no meaning.
    """
    get_backend(settings.dsa_attention_backend)
    coeff = settings.indexer_loss_coeff
    if not (coeff >= 0 and math.isfinite(coeff)):
        raise ConfigError(
            "indexer_loss_coeff is no weight", got=coeff, expected="a number from 0 up"
        )
    if settings.attention_parallel not in get_args(AttentionParallel):
        raise ConfigError(
            "unknown kind of attention_parallel",
            got=repr(settings.attention_parallel),
            expected=", ".join(get_args(AttentionParallel)),
        )
    _check_fp8(settings)


def _check_fp8(settings: Glm5Settings) -> None:
    if settings.base_weights not in get_args(BaseWeights):
        raise ConfigError(
            "unknown kind of base_weights",
            got=repr(settings.base_weights),
            expected=", ".join(get_args(BaseWeights)),
        )
    if settings.fp8_compute and settings.base_weights != "fp8":
        raise ConfigError(
            "fp8_compute multiplies by float8 weights, and there are none",
            got=f"base_weights {settings.base_weights!r}",
            expected="base_weights 'fp8'",
            remedy="set base_weights to 'fp8', or drop fp8_compute",
        )
    if settings.fp8_transient_mib < 1:
        raise ConfigError(
            "fp8_transient_mib is no size",
            got=settings.fp8_transient_mib,
            expected="at least 1 [MiB]",
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


def architecture(glm5: Glm5Config) -> dict[str, Any]:
    """What the published configuration says in Megatron's fields: another value, another model."""
    return {
        "num_layers": glm5.num_hidden_layers,
        "hidden_size": glm5.hidden_size,
        "ffn_hidden_size": glm5.intermediate_size,
        "num_attention_heads": glm5.num_attention_heads,
        # Megatron-Bridge's config says False; who counts operations reads it
        "multi_latent_attention": True,
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
        "num_moe_experts": glm5.n_routed_experts,
        "moe_layer_freq": [int(kind == "sparse") for kind in glm5.mlp_layer_types],
        "moe_ffn_hidden_size": glm5.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": glm5.n_shared_experts * glm5.moe_intermediate_size,
        "moe_router_topk": glm5.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": glm5.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def router_choices(device: torch.device) -> dict[str, Any]:
    """How experts are run and their router is trained."""
    return {
        # under overlap the shared expert's reduction happens outside its linear, and an adapter on
        # it would be counted once per tensor-parallel rank
        "moe_shared_expert_overlap": False,
        # the published bias is kept: fine-tuning must not drift it
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        # Megatron's alltoall dispatcher splits by CUDA tensors
        "moe_token_dispatcher_type": "allgather" if device.type == "cpu" else "alltoall",
        "moe_grouped_gemm": False,
    }


def _recompute(recompute: Recompute) -> dict[str, Any]:
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


def _execution(device: torch.device, dtype: torch.dtype, layout: Layout) -> dict[str, Any]:
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
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # experts need it beside tensor parallelism
        "sequence_parallel": layout.tp > 1,
        **megatron_kernels(),
    }


def megatron_kernels() -> dict[str, Any]:
    """Which of Megatron's own kernels run, and how its trainer scales the loss."""
    return {
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
