"""Glm5Config reads the published configurations and refuses what cannot be right."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import GlmMoeDsaConfig

from glm5.config import Fp8Quantization, Glm5Config
from glm5.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "src/glm5/configs"
ABSENT = object()


def raw_config(name: str = "glm52", **changes: Any) -> dict[str, Any]:
    """A published config.json with some keys changed, or removed by ABSENT."""
    raw: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return {key: value for key, value in (raw | changes).items() if value is not ABSENT}


def read(name: str = "glm52", **changes: Any) -> Glm5Config:
    return Glm5Config.from_hf_dict(raw_config(name, **changes))


def small(**changes: Any) -> dict[str, Any]:
    """GLM-5 with four layers."""
    return raw_config("glm5", num_hidden_layers=4, **changes)


def refused(raw: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Glm5Config.from_hf_dict(raw)
    assert caught.value.expected is not None
    return caught.value


def test_glm5() -> None:
    config = read("glm5")
    assert config.indexer_types == ("full",) * 78
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert config.rope_theta == 1_000_000
    assert (config.latent_norm_eps, config.indexer_norm_eps) == (1e-6, 1e-6)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_id == (154820, 154827, 154829)
    assert config.fp8 is None


def test_glm52() -> None:
    config = read("glm52")
    full = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)]
    assert len(full) == 21
    assert config.indexer_types.count("shared") == 57
    assert config.rope_theta == 8_000_000
    assert config.max_position_embeddings == 1_048_576


def test_derived_sizes() -> None:
    config = read()
    assert (config.qk_head_dim, config.d_qk, config.d_v) == (256, 576, 512)
    assert config.softmax_scale == 256**-0.5
    assert config.num_layers_with_mtp == 79


@pytest.mark.parametrize("head_dim", [64, 192, 7, ABSENT])
def test_head_dim_is_never_used(head_dim: Any) -> None:
    config = read(head_dim=head_dim)
    assert (config.qk_rope_head_dim, config.qk_head_dim) == (64, 256)


def test_n_routed_experts_wins_over_num_experts() -> None:
    config = Glm5Config.from_hf_dict(small(n_routed_experts=8, num_experts=256))
    assert config.n_routed_experts == 8
    assert "num_experts" not in config.to_hf_dict()


def test_num_experts_alone_is_used_and_written_as_n_routed_experts() -> None:
    config = Glm5Config.from_hf_dict(small(n_routed_experts=ABSENT, num_experts=16))
    assert config.n_routed_experts == 16
    assert config.to_hf_dict()["n_routed_experts"] == 16


@pytest.mark.parametrize(
    "sources",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000}},
        {"rope_parameters": ABSENT, "rope_theta": 500000.0},
        {"rope_parameters": None, "rope_theta": 500000},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 500000},
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "default"}, "rope_theta": 5e5},
    ],
)
def test_rope_theta_flat_or_nested(sources: dict[str, Any]) -> None:
    assert read(**sources).rope_theta == 500000


@pytest.mark.parametrize(
    ("sources", "what"),
    [
        ({"rope_parameters": ABSENT}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": 10000}, "given twice with different values"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "unsupported rope_param"),
        ({"rope_parameters": {"rope_theta": 1e6, "type": "linear"}}, "unsupported rope_parameters"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "unsupported rope_parameters",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unsupported rope_scaling"),
        ({"rope_parameters": [8000000]}, "rope_parameters is not valid"),
        ({"rope_parameters": ABSENT, "rope_theta": "1e6"}, "rope_theta is not valid"),
        ({"rope_parameters": ABSENT, "rope_theta": True}, "rope_theta is not valid"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is not valid"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is not valid"),
    ],
)
def test_rope_theta_refused(sources: dict[str, Any], what: str) -> None:
    assert what in refused(raw_config(**sources)).what


def test_indexer_rope_interleave_is_kept() -> None:
    assert read().indexer_rope_interleave
    assert read(indexer_rope_interleave=ABSENT).indexer_rope_interleave
    assert not read(indexer_rope_interleave=False).indexer_rope_interleave


def test_latent_norm_eps_is_read_and_written() -> None:
    assert "latent_norm_eps" not in read().to_hf_dict()
    config = read(latent_norm_eps=1e-5)
    assert config.latent_norm_eps == 1e-5
    assert config.to_hf_dict()["latent_norm_eps"] == 1e-5
    back = config.model_copy(update={"latent_norm_eps": 1e-6})
    assert "latent_norm_eps" not in back.to_hf_dict()


def test_mtp_layers() -> None:
    config = read(num_nextn_predict_layers=ABSENT)
    assert config.num_layers_with_mtp == config.num_hidden_layers == 78


@pytest.mark.parametrize(
    ("eos", "ids"), [(5, (5,)), ([5], (5,)), ([], ()), (None, ()), (ABSENT, ())]
)
def test_eos_token_id(eos: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=eos).eos_token_id == ids


@pytest.mark.parametrize(
    "dtype", [{"torch_dtype": "float32", "dtype": ABSENT}, {"dtype": "float32"}]
)
def test_dtype_under_either_name(dtype: dict[str, Any]) -> None:
    assert read(**dtype).dtype == "float32"


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
}


def test_fp8_quantization() -> None:
    config = read(quantization_config=FP8)
    assert config.fp8 == Fp8Quantization(
        weight_block_size=(128, 128),
        modules_to_not_convert=("lm_head", "model.layers.0.self_attn.indexers_proj"),
    )
    assert config.to_hf_dict()["quantization_config"] == FP8


@pytest.mark.parametrize("old", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16", "dtype": None}])
def test_another_dtype_keeps_all_else(old: dict[str, Any]) -> None:
    config = read(quantization_config=FP8, latent_norm_eps=1e-5, **old)
    other = config.in_dtype("float32")
    assert other.dtype == "float32" == other.to_hf_dict()["dtype"]
    assert "torch_dtype" not in other.to_hf_dict()
    same = {"dtype": "bfloat16", "hf_raw": config.hf_raw}
    assert other.model_copy(update=same) == config
    with pytest.raises(ConfigError):
        config.in_dtype("int8")


def test_dequantised_config_is_written_without_quantization() -> None:
    config = read(quantization_config=FP8).model_copy(update={"fp8": None})
    assert "quantization_config" not in config.to_hf_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "gptq"},
        {"fmt": "e5m2"},
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 0]},
        {"weight_block_size": [128, 128.0]},
        {"modules_to_not_convert": "lm_head"},
        {"modules_to_not_convert": [1]},
    ],
)
def test_other_quantization_is_refused(change: dict[str, Any]) -> None:
    refused(raw_config(quantization_config=FP8 | change))


def test_what_is_wrong_is_not_hidden_among_names_of_modules() -> None:
    error = refused(raw_config(quantization_config=FP8 | {"fmt": "e5m2"}))
    assert "'fmt': 'e5m2'" in str(error) and "lm_head" not in str(error)


@pytest.mark.parametrize("value", ["fp8", [], True])
def test_quantization_config_is_an_object(value: Any) -> None:
    assert "quantization_config" in refused(raw_config(quantization_config=value)).what


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "max_position_embeddings",
]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [ABSENT, None, 0, -1, True, "64", 64.0, [64], 2**31])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    assert name in str(refused(raw_config("glm5", **{name: value})))


@pytest.mark.parametrize("name", ["rms_norm_eps", "routed_scaling_factor"])
@pytest.mark.parametrize("value", [ABSENT, 0.0, -1.0, "1e-5", True, float("nan"), float("inf")])
def test_factors_are_positive_numbers(name: str, value: Any) -> None:
    assert name in str(refused(raw_config(**{name: value})))


def test_all_missing_fields_are_named_at_once() -> None:
    error = refused({"model_type": "glm_moe_dsa"})
    assert "hidden_size" in str(error.got)
    assert "index_topk" in str(error.got)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "glm5_next"}, "GLM-5.3-Flash"),
        ({"model_type": "deepseek_v32"}, "'deepseek_v32'"),
        ({"model_type": ABSENT}, "model_type None"),
        ({"qk_rope_head_dim": 63, "qk_head_dim": 255}, "qk_rope_head_dim is odd"),
        ({"index_head_dim": 63}, "no room for the rotated dims"),
        ({"qk_head_dim": 192}, "qk_head_dim contradicts"),
        ({"num_key_value_heads": 8}, "num_key_value_heads contradicts"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is larger"),
        ({"n_group": 8}, "n_group"),
        ({"topk_group": 4}, "topk_group"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"indexer_rope_interleave": "true"}, "indexer_rope_interleave"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_bias": 0}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"dtype": ABSENT}, "dtype"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"torch_dtype": "float32"}, "dtype and torch_dtype differ"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
        ({"pad_token_id": 154880}, "pad_token_id is outside"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers"),
        ({"latent_norm_eps": 0}, "latent_norm_eps"),
        ({"vocab_size": 1}, "vocab_size"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_refused(change: dict[str, Any], named: str) -> None:
    error = refused(raw_config(**change))
    assert named in str(error)
    assert error.remedy is not None


def test_boundaries_are_accepted() -> None:
    config = read(index_head_dim=64, num_experts_per_tok=256, pad_token_id=154879)
    assert config.index_head_dim == config.qk_rope_head_dim


def test_frozen_and_closed() -> None:
    config = read()
    with pytest.raises(ValidationError, match="frozen"):
        config.hidden_size = 1  # type: ignore[misc]
    fields = config.model_dump()
    Glm5Config(**fields)
    with pytest.raises(ValidationError, match="head_dim"):
        Glm5Config(**fields, head_dim=64)
    with pytest.raises(ValidationError, match="wrong length"):
        Glm5Config(**fields | {"num_hidden_layers": 77})
    with pytest.raises(ValidationError, match="first layer is shared"):
        Glm5Config(**fields | {"indexer_types": ("shared",) * 78})


def test_every_field_is_documented() -> None:
    for model in (Glm5Config, Fp8Quantization):
        assert [n for n, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("name", ["glm5", "glm52"])
def test_written_config_is_the_published_one(name: str) -> None:
    raw = raw_config(name)
    config = Glm5Config.from_hf_dict(raw)
    assert config.to_hf_dict() == raw
    poison = {
        "layer_types": ["indexed_attention"] * 78,
        "num_experts": 256,
        "mlp_bias": False,
        "output_router_logits": False,
    }
    assert Glm5Config.from_hf_dict(raw | poison).to_hf_dict() == raw


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": ABSENT},
        {"num_key_value_heads": None},
        {"routed_scaling_factor": 2},
        {"rms_norm_eps": 1},
        {"initializer_range": 0},
        {"rope_parameters": None, "rope_theta": 1000000},
        {"index_topk_freq": None},
        {"index_skip_topk_offset": None},
        {"indexer_types": None},
        {"mlp_layer_types": None},
        {"first_k_dense_replace": None},
        {"hidden_act": None},
        {"n_group": None},
        {"norm_topk_prob": None},
        {"num_nextn_predict_layers": None},
        {"initializer_range": None},
        {"attention_bias": None},
        {"moe_layer_freq": None},
        {"eos_token_id": None},
        {"quantization_config": None},
    ],
)
def test_transformers_takes_whatever_is_accepted(change: dict[str, Any]) -> None:
    config = Glm5Config.from_hf_dict(raw_config("glm5", **change))
    theirs = GlmMoeDsaConfig(**config.to_hf_dict())
    assert theirs.num_key_value_heads == config.num_attention_heads
    assert tuple(theirs.indexer_types) == config.indexer_types
    assert tuple(theirs.mlp_layer_types) == config.mlp_layer_types
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.routed_scaling_factor == config.routed_scaling_factor


def test_the_raw_dict_is_kept_apart() -> None:
    raw = raw_config()
    config = Glm5Config.from_hf_dict(raw)
    raw["rope_parameters"]["rope_theta"] = 1
    config.to_hf_dict()["rope_parameters"]["rope_theta"] = 2
    assert config.to_hf_dict() == raw_config()


def test_a_changed_copy_is_not_written_with_the_old_value() -> None:
    changed = read().model_copy(update={"hidden_size": 8})
    with pytest.raises(ConfigError, match="hidden_size = 8"):
        changed.to_hf_dict()
