"""Adapters that PEFT trained are read as PEFT computes them; ranks, scales and whole modules."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glm5.checkpoint.adapter_io import (
    LoraAdapter,
    LoraFactors,
    adapter_linears,
    compare_adapters,
    load_peft_model,
    module_tensors,
    read_adapter,
)
from glm5.config import Glm5Config
from glm5.errors import AdapterError
from tests.adapters import (
    KINDS,
    NUM_EXPERTS,
    RANK,
    SETTINGS,
    WEIGHTS,
    Factors,
    adapter_of,
    assert_same,
    edit_settings,
    edit_tensors,
    load_hf,
    logits,
    make_factors,
    merged_logits,
    verify,
    write,
)
from tests.checkpoint.test_adapter_serving import shared_outer

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

PEFT_SETTINGS: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_a_proj", "kv_b_proj", "wk"]},
    "pattern": {"target_modules": r".*\.layers\.[13]\..*\.o_proj"},
    "some_layers": {"target_modules": ["q_b_proj"], "layers_to_transform": [0, 3]},
    "excluded": {"target_modules": ["o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"]},
    "dropout": {"target_modules": ["o_proj"], "lora_dropout": 0.1},
    "fused_experts": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
    "shared_experts": {
        "target_modules": [],
        "target_parameters": ["shared_experts.up_proj.weight", "layers.0.mlp.gate_proj.weight"],
    },
    "mlp_names": {"target_modules": ["q_a_proj", "gate_proj", "up_proj", "down_proj"]},
    "rslora": {"target_modules": ["q_a_proj"], "target_parameters": EXPERTS, "use_rslora": True},
    "rslora_mlp_names": {"target_modules": ["gate_proj", "up_proj"], "use_rslora": True},
    "ranks": {
        "target_modules": ["q_a_proj", "kv_b_proj"],
        "target_parameters": [*EXPERTS, "shared_experts.up_proj.weight"],
        "rank_pattern": {
            "layers.1.self_attn.q_a_proj": 2,
            "mlp.experts.gate_up_proj": 6,
            "shared_experts.up_proj.weight": 5,
            ".*kv_b_proj": 1,
        },
        "alpha_pattern": {"kv_b_proj": 7, "mlp.experts.down_proj": 1.5},
        "use_rslora": True,
    },
    "modules": {
        "target_modules": ["q_a_proj"],
        "modules_to_save": [
            *("mlp.gate", "embed_tokens", "lm_head", "model.norm", "layers.3.input_layernorm"),
            *("q_a_layernorm", "layers.1.self_attn.indexer.k_norm"),
        ],
    },
}


def save_with_peft(folder: Path, hf_dir: Path, settings: dict[str, Any]) -> Tensor:
    """Let PEFT make and save an adapter of random values; return the logits of its model."""
    model = peft.get_peft_model(
        load_hf(hf_dir), peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            if ".modules_to_save." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return logits(model.eval())


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", PEFT_SETTINGS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft")
def test_reads_what_peft_wrote(kind: str, hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    expected = save_with_peft(tmp_path / "peft", hf_dir, PEFT_SETTINGS[kind])
    read = read_adapter(tmp_path / "peft", config)
    assert bool(read.modules) == (kind == "modules")
    assert_close(merged_logits(hf_dir, read.factors, read.modules), expected)
    write(tmp_path / "ours", read, config)
    verify(tmp_path / "ours", hf_dir, read)
    again = read_adapter(tmp_path / "ours", config)
    assert_same(again.factors, read.factors)
    assert again.modules.keys() == read.modules.keys()


@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft")
def test_a_low_rank_router_is_refused(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    save_with_peft(tmp_path / "peft", hf_dir, {"target_modules": "all-linear"})
    with pytest.raises(
        AdapterError, match=r"mlp\.gate(?s:.*)low-rank router(?s:.*)modules_to_save"
    ):
        read_adapter(tmp_path / "peft", config)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft")
def test_a_whole_linear_is_refused(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_a_proj"], "modules_to_save": ["o_proj"]}
    save_with_peft(tmp_path / "peft", hf_dir, settings)
    with pytest.raises(AdapterError, match=r"o_proj\.weight(?s:.*)merge this adapter with PEFT"):
        read_adapter(tmp_path / "peft", config)


# --- one pair per expert, as PEFT wrote where experts were modules ---


def save_per_expert(folder: Path, factors: Factors, targets: list[str] | str) -> None:
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": RANK,
        "lora_alpha": 5,
        "target_modules": targets,
    }
    (folder / SETTINGS).write_text(json.dumps(settings))
    prefix = "base_model.model."
    tensors = {f"{prefix}{path}.lora_A.weight": pair.a for path, pair in factors.items()}
    tensors |= {f"{prefix}{path}.lora_B.weight": pair.b for path, pair in factors.items()}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    "targets",
    [["gate_proj", "up_proj", "down_proj"], r".*\.mlp\.experts\..*_proj"],
    ids=["names", "pattern"],
)
def test_reads_one_pair_per_expert(
    targets: list[str] | str, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, KINDS["routed_experts"])
    save_per_expert(tmp_path / "adapter", factors, targets)
    read = read_adapter(tmp_path / "adapter", config)
    assert read.expert_lora == "per_expert"
    assert_same(read.factors, factors)


def test_one_pair_per_expert_is_what_peft_computes(
    hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(
        config, lambda path: KINDS["routed_experts"](path) or path.endswith("q_a_proj")
    )
    targets = ["q_a_proj", "gate_proj", "up_proj", "down_proj"]
    save_per_expert(tmp_path / "adapter", factors, targets)
    read = read_adapter(tmp_path / "adapter", config)
    expected = logits(load_peft_model(tmp_path / "adapter", hf_dir, config))
    assert_close(merged_logits(hf_dir, read.factors), expected)


def test_single_experts_beside_shared_ones_are_all_read(config: Glm5Config, tmp_path: Path) -> None:
    """PEFT on transformers 5 would lose the shared experts of such a file."""
    factors = make_factors(config, lambda path: ".mlp." in path)
    save_per_expert(tmp_path / "adapter", factors, ["gate_proj", "up_proj", "down_proj"])
    assert_same(read_adapter(tmp_path / "adapter", config).factors, factors)
    edit_tensors(
        tmp_path / "adapter",
        lambda tensors: tensors.__delitem__(
            f"base_model.model.{next(iter(factors))}.lora_B.weight"
        ),
    )
    with pytest.raises(AdapterError, match="lacks tensors"):
        read_adapter(tmp_path / "adapter", config)


# --- ranks and scales ---


def by_kind(path: str, index: int) -> tuple[int, float]:
    return (2, 3.0) if path.endswith("o_proj") else (RANK, 1.0)


def by_layer(path: str, index: int) -> tuple[int, float]:
    layer = int(path.split(".")[2])
    return 1 + layer, (0.5, 1.0, 2.0, 0.3, 1 / 3)[layer]


def within_layers(path: str, index: int) -> tuple[int, float]:
    """Powers of two, so that experts of one layer are rescaled exactly."""
    return 1 + index % 3, (1.0, 2.0)[index % 2]


def ranked(config: Glm5Config, rule: Callable[[str, int], tuple[int, float]]) -> Factors:
    factors: Factors = {}
    for index, (path, (m, n)) in enumerate(adapter_linears(config).items()):
        rank, scale = rule(path, index)
        a, b = torch.randn(rank, n) / n**0.5, 0.2 * torch.randn(m, rank)
        factors[path] = LoraFactors(a, b, scale)
    return factors


@pytest.mark.parametrize("rule", [by_kind, by_layer, within_layers])
def test_peft_applies_every_rank_and_scale(
    rule: Callable[[str, int], tuple[int, float]],
    hf_dir: Path,
    config: Glm5Config,
    tmp_path: Path,
) -> None:
    factors = ranked(config, rule)
    write(tmp_path / "adapter", factors, config)
    verify(tmp_path / "adapter", hf_dir, factors)
    got = logits(load_peft_model(tmp_path / "adapter", hf_dir, config))
    assert_close(got, merged_logits(hf_dir, factors))
    read = read_adapter(tmp_path / "adapter", config)
    assert compare_adapters(read, adapter_of(factors))[0] == 0.0
    if rule is not within_layers:
        assert_same(read.factors, factors)


def test_patterns_are_few(config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "adapter", ranked(config, by_kind), config)
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (RANK, RANK, False)
    assert settings["rank_pattern"] == {"o_proj": 2, r"mlp\.experts\.gate_up_proj": 2 * RANK}
    assert settings["alpha_pattern"] == {"o_proj": 6, r"mlp\.experts\.gate_up_proj": 2 * RANK}


def test_scales_of_fused_experts_that_differ_are_rounded_once(
    hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    factors = {
        path: LoraFactors(pair.a.bfloat16(), pair.b.bfloat16(), (1.0, 1.0, 1.0, 0.3)[i % 4])
        for i, (path, pair) in enumerate(make_factors(config, KINDS["routed_experts"]).items())
    }
    write(tmp_path / "adapter", factors, config)
    verify(tmp_path / "adapter", hf_dir, factors)
    error, limit = compare_adapters(read_adapter(tmp_path / "adapter", config), adapter_of(factors))
    assert 0 < error <= limit < 2**-7.9


def test_rslora_is_written_as_it_trained(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    factors = {
        path: LoraFactors(pair.a, pair.b, 5 / RANK**0.5)
        for path, pair in make_factors(config).items()
    }
    write(tmp_path / "adapter", factors, config)
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    assert (settings["use_rslora"], settings["lora_alpha"], settings["r"]) == (True, 5, RANK)
    verify(tmp_path / "adapter", hf_dir, factors)
    assert_same(read_adapter(tmp_path / "adapter", config).factors, factors)
    edit_settings(tmp_path / "adapter", use_rslora=False)
    with pytest.raises(AdapterError, match="another delta"):
        verify(tmp_path / "adapter", hf_dir, factors)


def test_shared_factors_are_written_once_per_expert(
    hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    adapter = shared_outer(make_factors(config))
    write(tmp_path / "adapter", adapter, config)
    verify(tmp_path / "adapter", hf_dir, adapter)
    read = read_adapter(tmp_path / "adapter", config)
    assert read.expert_lora == "per_expert"
    assert_same(read.factors, adapter.factors)


# --- whole modules ---


def whole_modules(config: Glm5Config) -> dict[str, Tensor]:
    """Of every kind."""
    chosen = (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.indexer.k_norm.bias",
        "model.layers.1.self_attn.indexer.k_norm.weight",
        "model.layers.1.self_attn.kv_a_layernorm.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.4.mlp.gate.weight",
        "model.layers.4.mlp.gate.e_score_correction_bias",
    )
    return {name: 0.3 * torch.randn(module_tensors(config)[name]) for name in chosen}


def with_modules(config: Glm5Config) -> LoraAdapter:
    return adapter_of(make_factors(config, KINDS["one_layer"]), whole_modules(config))


def test_peft_computes_with_whole_modules(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    adapter = with_modules(config)
    write(tmp_path / "adapter", adapter, config)
    verify(tmp_path / "adapter", hf_dir, adapter)
    expected = merged_logits(hf_dir, adapter.factors, adapter.modules)
    assert_close(logits(load_peft_model(tmp_path / "adapter", hf_dir, config)), expected)
    read = read_adapter(tmp_path / "adapter", config)
    assert read.modules.keys() == adapter.modules.keys()
    assert all(torch.equal(read.modules[name], tensor) for name, tensor in adapter.modules.items())
    assert compare_adapters(read, adapter)[0] == 0.0


def test_a_lost_module_is_found(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    adapter = with_modules(config)
    write(tmp_path / "adapter", adapter, config)
    saved = json.loads((tmp_path / "adapter" / SETTINGS).read_text())["modules_to_save"]
    assert "model.layers.4.mlp.gate" in saved
    edit_settings(tmp_path / "adapter", modules_to_save=saved[1:])
    with pytest.raises(AdapterError, match="does not load modules"):
        verify(tmp_path / "adapter", hf_dir, adapter)
    with pytest.raises(AdapterError, match="belong to no target"):
        read_adapter(tmp_path / "adapter", config)
    edit_settings(tmp_path / "adapter", modules_to_save=saved)
    name = "model.layers.4.mlp.gate.weight"
    edit_tensors(
        tmp_path / "adapter", lambda tensors: tensors[f"base_model.model.{name}"].add_(1e-3)
    )
    with pytest.raises(AdapterError, match=f"another value(?s:.*){name}"):
        verify(tmp_path / "adapter", hf_dir, adapter)


def test_half_of_a_module_cannot_be_written(config: Glm5Config, tmp_path: Path) -> None:
    adapter = with_modules(config)
    bias = "model.layers.4.mlp.gate.e_score_correction_bias"
    modules = {name: tensor for name, tensor in adapter.modules.items() if name != bias}
    with pytest.raises(AdapterError, match=f"incomplete(?s:.*){bias}"):
        write(tmp_path / "adapter", replace(adapter, modules=modules), config)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.2.mlp.gate.weight", torch.ones(NUM_EXPERTS + 1, 32), "does not fit"),
        ("model.layers.2.mlp.gate.weight", torch.ones(NUM_EXPERTS, 32).int(), "does not fit"),
        ("model.layers.2.mlp.gate.weight", torch.full((NUM_EXPERTS, 32), torch.nan), "NaN"),
        ("model.layers.2.self_attn.o_proj.weight", torch.ones(32, 32), "cannot be saved"),
        ("model.layers.5.enorm.weight", torch.ones(32), "cannot be saved"),
        ("norm", torch.ones(32), "cannot be saved"),
    ],
)
def test_modules_that_cannot_be_written(
    name: str, tensor: Tensor, message: str, config: Glm5Config, tmp_path: Path
) -> None:
    config = config.model_copy(update={"num_nextn_predict_layers": 1})
    adapter = replace(with_modules(config), modules={name: tensor})
    with pytest.raises(AdapterError, match=message):
        write(tmp_path / "adapter", adapter, config)
    assert not list(tmp_path.iterdir())
