"""The provider is the model's config, and does not build what would be computed wrongly."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.utils.instantiate_utils import instantiate
from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml
from megatron.core.transformer.enums import LayerType
from omegaconf import OmegaConf

from glm5.errors import BackendError, ConfigError, LayoutError
from glm5.integrations.megatron_bridge import GLM5ModelProvider
from glm5.model.attention import DSASelfAttention
from glm5.model.experts import GroupedLinear
from glm5.model.indexer import LightningIndexer
from glm5.model.linear import ReplicatedLinear
from glm5.ops import backends
from tests.bridge.models import bridged, provider_of
from tests.tiny_models import TinyFolder, modules_of


def test_provider_is_a_dataclass_of_bridge_s_kind() -> None:
    assert issubclass(GLM5ModelProvider, MLAModelProvider)
    fields = {field.name: field.type for field in dataclasses.fields(GLM5ModelProvider)}
    assert fields["dsa_attention_backend"] in (str, "str")


def test_every_module_reads_the_provider(tiny_folder: TinyFolder) -> None:
    provider = provider_of(tiny_folder("5.2"), use_cpu_initialization=True)
    provider.dsa_attention_backend = "megatron"
    model = provider.provide()
    assert model.config is provider
    assert provider.multi_latent_attention
    readers = [*modules_of(model, DSASelfAttention), *modules_of(model, LightningIndexer)]
    assert len(readers) == 7 + 4
    for path, module in readers:
        assert module.config is provider, path
        assert module.backend is backends.get_backend("megatron"), path


def test_backend_defaults_to_the_device_s(tiny_folder: TinyFolder) -> None:
    expected = "triton" if torch.cuda.is_available() else "torch"
    assert provider_of(tiny_folder("5")).dsa_attention_backend == expected


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dsa_attention_backend": "flash"}, BackendError, "unknown attention backend"),
    ({"num_layers": 3}, ConfigError, "num_layers = 3"),
    ({"moe_router_topk": 4}, ConfigError, "moe_router_topk = 4"),
    ({"vocab_size": 640}, ConfigError, "vocab_size = 640"),
    ({"moe_shared_expert_overlap": True}, ConfigError, "moe_shared_expert_overlap"),
    ({"share_embeddings_and_output_weights": True}, ConfigError, "share_embeddings"),
    ({"params_dtype": torch.float16}, ConfigError, "dtype is not supported"),
    ({"fp16": True}, ConfigError, "fp16"),
    ({"bf16": True}, ConfigError, "contradict each other"),
    ({"params_dtype": torch.bfloat16}, ConfigError, "bf16 = False"),
    ({"activation_func_clamp_value": 7.0}, ConfigError, "clamp"),
    ({"glu_linear_offset": 1.0}, ConfigError, "glu_linear_offset"),
    ({"add_qkv_bias": True}, ConfigError, "add_qkv_bias"),
    ({"layernorm_zero_centered_gamma": True}, ConfigError, "zero_centered"),
    ({"rotary_percent": 0.5}, ConfigError, "rotary_percent"),
    ({"seq_len_interpolation_factor": 2.0}, ConfigError, "seq_len_interpolation"),
    ({"window_size": (4, 0)}, ConfigError, "window_size"),
    ({"moe_shared_expert_gate": True}, ConfigError, "moe_shared_expert_gate"),
    ({"moe_latent_size": 16}, ConfigError, "moe_latent_size"),
    ({"moe_apply_probs_on_input": True}, ConfigError, "moe_apply_probs_on_input"),
    ({"moe_router_group_topk": 1}, ConfigError, "moe_router_group_topk"),
    ({"moe_mlp_glu_interleave_size": 4}, ConfigError, "moe_mlp_glu_interleave_size"),
    ({"moe_shared_expert_glu_interleave_size": 4}, ConfigError, "shared_expert_glu_interleave"),
    ({"softmax_scale": 0.5}, ConfigError, "softmax_scale"),
    ({"softmax_type": "learnable"}, ConfigError, "softmax_type"),
    ({"qk_l2_norm": True}, ConfigError, "qk_l2_norm"),
    ({"no_rope_freq": 7}, ConfigError, "no_rope_freq"),
    ({"rope_scaling": True}, ConfigError, "rope_scaling"),
    ({"use_mup": True}, ConfigError, "use_mup"),
    ({"experimental_attention_variant": "dsa"}, ConfigError, "experimental_attention_variant"),
    ({"linear_attention_freq": 2}, ConfigError, "linear_attention_freq"),
    ({"heterogeneous_block_specs": True}, ConfigError, "heterogeneous_block_specs"),
    ({"use_te_activation_func": True}, ConfigError, "use_te_activation_func"),
    ({"mtp_use_repeated_layer": True}, ConfigError, "mtp_use_repeated_layer"),
    *[
        ({"moe_token_dispatcher_type": "alltoall", name: value}, ConfigError, name)
        for name, value in (
            ("moe_permute_fusion", True),
            ("moe_expert_capacity_factor", 1.0),
            ("moe_pad_expert_input_to_capacity", True),
            ("moe_router_padding_for_quantization", True),
        )
    ],
    ({"multi_latent_attention": False}, ConfigError, "multi_latent_attention = False"),
    ({"dsa_indexer_topk": 4}, ConfigError, "dsa_indexer_topk"),
    ({"dsa_indexer_loss_coeff": 0.001}, ConfigError, "indexer_loss_coeff weighs its loss"),
    ({"dsa_kernel_backend": "tilelang"}, ConfigError, "dsa_attention_backend names"),
    ({"base_weights": "fp8"}, ConfigError, "base_weights"),
    ({"mtp_num_layers": 2}, ConfigError, "MTP layers"),
    ({"indexer_loss_coeff": -1.0}, ConfigError, "no weight"),
    ({"attention_parallel": "rows"}, ConfigError, "attention_parallel"),
    (
        {"indexer_loss_coeff": 0.1, "calculate_per_token_loss": False},
        ConfigError,
        "sums over tokens",
    ),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        ConfigError,
        "recompute_modules",
    ),
    ({"context_parallel_size": 2}, LayoutError, "context parallelism"),
    ({"tensor_model_parallel_size": 2}, LayoutError, "without sequence parallelism"),
    (
        {"tensor_model_parallel_size": 3, "sequence_parallel": True},
        LayoutError,
        "num_attention_heads",
    ),
    ({"pipeline_model_parallel_size": 8}, LayoutError, "too many pipeline stages"),
]


@pytest.mark.parametrize(("fields", "error", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_what_cannot_be_computed_does_not_build(
    tiny_folder: TinyFolder, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        provider_of(tiny_folder("5.2"), **fields)


def test_a_field_changed_after_finalize_is_seen_too(tiny_folder: TinyFolder) -> None:
    provider = provider_of(tiny_folder("5.2"), use_cpu_initialization=True)
    provider.hidden_size = 128
    with pytest.raises(ConfigError, match="hidden_size = 128"):
        provider.provide()


def test_the_core_s_indexer_loss_may_be_switched_off(tiny_folder: TinyFolder) -> None:
    provider = provider_of(tiny_folder("5.2"), dsa_indexer_loss_coeff=0.0)
    assert provider.indexer_loss_coeff == 0


def test_a_provider_that_is_not_finalized_does_not_build(tiny_folder: TinyFolder) -> None:
    bridge = AutoBridge.from_hf_pretrained(str(tiny_folder("5.2")))
    provider = bridge.to_megatron_provider(load_weights=False)
    with pytest.raises(ConfigError, match="before it was finalized"):
        provider.provide()


SHARED_STARTS: list[dict[str, Any]] = [
    {"pipeline_model_parallel_layout": "Et*4|t*3L"},
    {"num_layers_in_first_pipeline_stage": 5},
    {
        "pipeline_model_parallel_layout": "Et|t|t*3|t*2L",
        "virtual_pipeline_model_parallel_size": 2,
    },
]


@pytest.mark.parametrize("fields", SHARED_STARTS)
def test_a_stage_that_starts_on_a_shared_layer_does_not_build(
    tiny_folder: TinyFolder, fields: dict[str, Any]
) -> None:
    with pytest.raises(LayoutError, match="shares the keys that") as raised:
        provider_of(tiny_folder("5.2"), pipeline_model_parallel_size=2, **fields)
    assert "layers per stage [" in str(raised.value)


def test_stages_that_start_on_full_layers_build(tiny_folder: TinyFolder) -> None:
    """Empty stages of the embedding and the head start on no layer."""
    provider = provider_of(
        tiny_folder("5.2"),
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="E|t*2|t*4|tL",
    )
    assert provider.pipeline_model_parallel_size == 4


@pytest.mark.parametrize(
    ("pp", "vpp", "expected"), [(2, None, [[2], [5]]), (2, 2, [[1, 4], [1, 1]])]
)
def test_the_default_split_is_one_that_indexshare_allows(
    tiny_folder: TinyFolder, pp: int, vpp: int | None, expected: list[list[int]]
) -> None:
    provider = provider_of(
        tiny_folder("5.2"),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    layout = provider.pipeline_model_parallel_layout.layout
    decoders = [[stage.count(LayerType.decoder) for stage in rank] for rank in layout]
    assert decoders == expected


def test_run_config_keeps_the_provider(tiny_folder: TinyFolder) -> None:
    """Megatron-Bridge writes providers into run_config.yaml and makes them again from it."""
    bridge = AutoBridge.from_hf_pretrained(str(tiny_folder("5.2")))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.dsa_attention_backend = "megatron"
    target = f"{GLM5ModelProvider.__module__}.{GLM5ModelProvider.__qualname__}"
    fields = {field.name: getattr(provider, field.name) for field in dataclasses.fields(provider)}
    text = dump_dataclass_to_yaml({"_target_": target, **fields})
    again = instantiate(OmegaConf.create(text))
    assert again.glm5 == provider.glm5
    assert again.dsa_attention_backend == "megatron"
    again.finalize()
    provider.finalize()
    assert again.moe_layer_freq == provider.moe_layer_freq


def test_fresh_weights_are_drawn(tiny_folder: TinyFolder) -> None:
    provider = provider_of(
        tiny_folder("5.2"), use_cpu_initialization=True, perform_initialization=True
    )
    model = provider.provide()
    for name, weight in model.named_parameters():
        assert torch.isfinite(weight).all(), name
    ours = [*modules_of(model, ReplicatedLinear), *modules_of(model, GroupedLinear)]
    assert len(ours) > 20
    for path, module in ours:
        std = float(module.weight.std())
        assert 0.003 < std < 0.03, f"{path}: {std}"


def test_hf_config_of_the_provider_is_the_raw_one(tiny_folder: TinyFolder) -> None:
    bridge, _ = bridged(tiny_folder("5.2"))
    provider = provider_of(tiny_folder("5.2"))
    written = type(bridge._model_bridge).megatron_to_hf_config(provider)
    assert written == provider.glm5.to_hf_dict()
    assert "quantization_config" not in written


def test_folder_and_hub_style_names_are_both_found(tiny_folder: TinyFolder) -> None:
    folder: Path = tiny_folder("5.1")
    for name in (str(folder), folder):
        provider = AutoBridge.from_hf_pretrained(name).to_megatron_provider(load_weights=False)
        assert provider.glm5.num_hidden_layers == 3
