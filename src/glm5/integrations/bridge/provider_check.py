"""What a provider must not be asked for, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from glm5.errors import ConfigError, LayoutError
from glm5.model.layout import check_layout
from glm5.model.schedule import check_stages
from glm5.model.transformer_config import (
    SELECTIVE_MODULES,
    architecture,
    check_settings,
    torch_dtype,
)
from glm5.runtime.distributed import Layout

# Settings that our modules do not compute, or compute wrongly; each with the value that they do.
_ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "transformer_impl": ("local", "glm5 brings its own modules"),
    "share_embeddings_and_output_weights": (False, "GLM-5 has an output head of its own"),
    "moe_shared_expert_overlap": (False, "an adapter on a shared expert would count tp times"),
    "base_weights": ("dtype", "Megatron-Bridge reads and writes weights that are not quantised"),
    "fp16": (False, "glm5 computes in bf16 or fp32"),
    "fp8": (None, "glm5 computes in bf16 or fp32"),
    "fp4": (None, "glm5 computes in bf16 or fp32"),
    "activation_func_clamp_value": (None, "GLM-5 has a plain SwiGLU"),
    "glu_linear_offset": (0.0, "GLM-5 has a plain SwiGLU"),
    "add_qkv_bias": (False, "GLM-5 has no such bias"),
    "layernorm_zero_centered_gamma": (False, "GLM-5's norms multiply by their weight"),
    "rotary_percent": (1.0, "config.json says which dimensions are rotated"),
    "seq_len_interpolation_factor": (None, "GLM-5 does not scale positions"),
    "window_size": (None, "GLM-5's indexer chooses the keys"),
    "moe_shared_expert_gate": (False, "GLM-5 adds its shared expert as it is"),
    "moe_latent_size": (None, "GLM-5's experts read the hidden states"),
    "moe_apply_probs_on_input": (False, "GLM-5 weighs what experts give"),
    "moe_router_group_topk": (None, "GLM-5 chooses experts among all"),
    "moe_mlp_glu_interleave_size": (None, "glm5 keeps gate above up"),
    "moe_shared_expert_glu_interleave_size": (None, "glm5 keeps gate above up"),
    "softmax_scale": (None, "GLM-5 scales by the width of a head"),
    "softmax_type": ("vanilla", "GLM-5 has no attention sinks"),
    "qk_l2_norm": (False, "GLM-5 normalises its latents alone"),
    "no_rope_freq": (None, "GLM-5 rotates in every layer"),
    "rope_scaling": (False, "GLM-5 does not scale positions"),
    "use_mup": (False, "GLM-5 does not scale its embeddings and logits"),
    "experimental_attention_variant": (None, "glm5 brings its own modules"),
    "linear_attention_freq": (None, "GLM-5 has no linear attention"),
    "heterogeneous_block_specs": (False, "glm5 brings its own modules"),
    "use_te_activation_func": (False, "glm5 brings its own modules"),
    "mtp_use_repeated_layer": (False, "GLM-5 has weights for each of its MTP layers"),
}
# The same of the all-to-all dispatcher, of which we have our own.
_ONLY_VALUES_OF_ALLTOALL: dict[str, tuple[Any, str]] = {
    "moe_permute_fusion": (False, "rows of tokens have kernels of their own"),
    "moe_expert_capacity_factor": (None, "GLM-5 drops no tokens"),
    "moe_pad_expert_input_to_capacity": (False, "GLM-5 drops no tokens"),
    "moe_router_padding_for_quantization": (False, "glm5 computes in bf16 or fp32"),
}
# Of the fields that start as Megatron's own DSA calls its settings the one that is ours.
_CORE_DSA, _OUR_DSA = "dsa_", "dsa_attention_backend"


def check_provider(provider: Any) -> None:
    """Checks what does not depend on Megatron's completion of the config.

    Raises:
        ConfigError: it contradicts config.json, or asks for what is not computed.
        LayoutError: a size does not divide over the ranks, or ranks share what they cannot.
        BackendError: the attention backend is unknown or cannot run here.
    """
    _check_architecture(provider)
    _check_values(provider)
    _check_core_dsa(provider)
    check_settings(provider)
    torch_dtype(provider.params_dtype)
    _check_wrapped_dtype(provider)
    _check_recompute(provider)
    _check_parallel(provider)


def check_pipeline(provider: Any) -> None:
    """Checks the stages of a finalized provider.

    Raises:
        LayoutError: one starts on a shared layer.
    """
    check_stages(provider.glm5, _layers_per_stage(provider))


def _check_architecture(provider: Any) -> None:
    changed = [
        (name, value, getattr(provider, name))
        for name, value in _published(provider)
        if getattr(provider, name) != value
    ]
    if changed:
        raise ConfigError(
            "the provider contradicts the model's config.json",
            got=", ".join(f"{name} = {value!r}" for name, _, value in changed),
            expected=", ".join(f"{name} = {value!r}" for name, value, _ in changed),
            remedy="leave the fields alone; another model needs another config.json",
        )


def _published(provider: Any) -> Iterator[tuple[str, Any]]:
    yield from architecture(provider.glm5).items()
    yield "vocab_size", provider.glm5.vocab_size


def _check_values(provider: Any) -> None:
    values = _ONLY_VALUES
    if provider.moe_token_dispatcher_type == "alltoall":
        values = values | _ONLY_VALUES_OF_ALLTOALL
    for name, (only, reason) in values.items():
        if getattr(provider, name) != only:
            raise ConfigError(
                f"unsupported {name}",
                got=repr(getattr(provider, name)),
                expected=repr(only),
                remedy=f"provider.{name} = {only!r}: {reason}",
            )
    mtp, published = provider.mtp_num_layers or 0, provider.glm5.num_nextn_predict_layers
    if mtp not in (0, published):
        raise ConfigError(
            "the model has another number of MTP layers",
            got=f"mtp_num_layers = {mtp}",
            expected=f"None or {published}",
            remedy="leave MTP out, or take all of it",
        )
    extra_loss = mtp or provider.indexer_loss_coeff
    if extra_loss and not provider.calculate_per_token_loss:
        raise ConfigError(
            "the losses of the indexer and of MTP are sums over tokens",
            got="calculate_per_token_loss = False",
            expected="True, so that the trainer divides them as it does the main loss",
            remedy="set it, or indexer_loss_coeff = 0 and mtp_num_layers = None",
        )


def _check_core_dsa(provider: Any) -> None:
    """Settings of Megatron's own DSA would do nothing; its loss may be switched off."""
    for known in fields(provider):
        name, value = known.name, getattr(provider, known.name)
        if not name.startswith(_CORE_DSA) or name == _OUR_DSA or value == known.default:
            continue
        if name == "dsa_indexer_loss_coeff" and value == 0:
            continue
        raise ConfigError(
            f"{name} is of Megatron's own sparse attention, which is not used",
            got=repr(value),
            expected=repr(known.default),
            remedy="leave it alone: config.json describes the indexer, dsa_attention_backend names "
            "who computes it, indexer_loss_coeff weighs its loss",
        )


def _check_wrapped_dtype(provider: Any) -> None:
    """By the flag hosts cast the whole model after it is built and filled."""
    if provider.bf16 != (provider.params_dtype == torch.bfloat16):
        raise ConfigError(
            "bf16 and params_dtype contradict each other",
            got=f"bf16 = {provider.bf16}, params_dtype = {provider.params_dtype}",
            expected="bf16 = True with torch.bfloat16, and False with torch.float32",
            remedy="set both",
        )


def _check_recompute(provider: Any) -> None:
    if provider.recompute_granularity != "selective":
        return
    unknown = set(provider.recompute_modules or ()) - set(SELECTIVE_MODULES)
    if unknown:
        raise ConfigError(
            "unsupported recompute_modules",
            got=sorted(unknown),
            expected=f"some of {list(SELECTIVE_MODULES)}",
            remedy="recompute other modules, or recompute_granularity = 'full'",
        )


def _check_parallel(provider: Any) -> None:
    if provider.context_parallel_size > 1:
        raise LayoutError(
            "context parallelism is not supported through Megatron-Bridge",
            got=f"context_parallel_size = {provider.context_parallel_size}",
            expected="1: its batches give every rank two chunks of a sequence, and glm5's layers "
            "attend for one contiguous chunk",
            remedy="shard the sequence by tensor parallelism, or train with `glm5 train`",
        )
    if provider.tensor_model_parallel_size > 1 and not provider.sequence_parallel:
        raise LayoutError(
            "tensor parallelism without sequence parallelism",
            got="sequence_parallel = False",
            expected="True where tensor_model_parallel_size > 1",
            remedy="provider.sequence_parallel = True",
        )
    tp, ep = provider.tensor_model_parallel_size, provider.expert_model_parallel_size
    # Megatron-Bridge's default
    etp = provider.expert_tensor_parallel_size or (tp if ep == 1 else 1)
    check_layout(provider.glm5, Layout(tp=tp, ep=ep, etp=etp))


def _layers_per_stage(provider: Any) -> list[int]:
    """Decoder layers of every stage that has any, in the model's order.

    Stage i is on rank i mod pp.
    """
    pp, vpp = (
        provider.pipeline_model_parallel_size,
        provider.virtual_pipeline_model_parallel_size,
    )
    places = [(stage % pp, stage // pp) for stage in range(pp * (vpp or 1))]
    layout = provider.pipeline_model_parallel_layout
    if layout is not None:
        counts = [layout.layout[rank][chunk].count(LayerType.decoder) for rank, chunk in places]
    else:
        counts = [
            get_num_layers_to_build(provider, None if vpp is None else chunk, pp_rank=rank)
            for rank, chunk in places
        ]
    return [count for count in counts if count]
