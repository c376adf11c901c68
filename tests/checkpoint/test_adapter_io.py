"""Adapters as PEFT folders: bitwise round trips, and proof that PEFT applies every delta."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint import adapter_write
from glm5.checkpoint.adapter_io import LoraFactors, load_peft_model, read_adapter
from glm5.config import Glm5Config
from glm5.errors import AdapterError, CheckpointError, ConfigError
from tests.adapters import (
    KINDS,
    NUM_EXPERTS,
    RANK,
    SETTINGS,
    WEIGHTS,
    adapter_of,
    assert_same,
    edit_settings,
    edit_tensors,
    logits,
    make_factors,
    merged_logits,
    verify,
    write,
)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_applies_every_delta(
    kind: str, hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, KINDS[kind])
    write(tmp_path / "adapter", factors, config)
    report = verify(tmp_path / "adapter", hf_dir, factors)
    assert report.num_linears == len(factors) > 0
    assert report.num_tensors == 2 * report.num_weights
    assert 0 < report.max_error_over_bound <= 1
    expected = merged_logits(hf_dir, factors)
    got = logits(load_peft_model(tmp_path / "adapter", hf_dir, config))
    assert (expected - merged_logits(hf_dir, {})).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_write_then_read_is_bitwise(
    kind: str, dtype: torch.dtype, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, KINDS[kind], dtype)
    write(tmp_path / "adapter", factors, config)
    read = read_adapter(tmp_path / "adapter", config)
    assert read.expert_lora == adapter_of(factors).expert_lora and not read.modules
    assert_same(read.factors, factors)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_untrained_factors_round_trip(rank: int, config: Glm5Config, tmp_path: Path) -> None:
    factors = {
        path: LoraFactors(pair.a, torch.zeros_like(pair.b), pair.scale)
        for path, pair in make_factors(config, rank=rank, alpha=0.7).items()
    }
    write(tmp_path / "adapter", factors, config)
    assert_same(read_adapter(tmp_path / "adapter", config).factors, factors)


def test_bf16_adapter_verifies(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, dtype=torch.bfloat16)
    write(tmp_path / "adapter", factors, config)
    verify(tmp_path / "adapter", hf_dir, factors)


def test_mapping_in_any_order(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    factors = dict(reversed(make_factors(config).items()))
    write(tmp_path / "adapter", factors, config)
    verify(tmp_path / "adapter", hf_dir, factors)
    assert_same(read_adapter(tmp_path / "adapter", config).factors, factors)


def test_complete_kinds_are_named_once(config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "adapter", make_factors(config), config)
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    assert len(settings["target_modules"]) == 8
    assert set(settings["target_parameters"]) == {
        *(f"mlp.{leaf}_proj.weight" for leaf in ("gate", "up", "down")),
        *(f"shared_experts.{leaf}_proj.weight" for leaf in ("gate", "up", "down")),
        *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    }


def test_peft_order_of_nesting_is_not_that_of_the_targets(
    hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, KINDS["routed_experts"])
    write(tmp_path / "adapter", factors, config)
    for order in (["down_proj", "gate_up_proj"], ["gate_up_proj", "down_proj"]):
        names = [f"mlp.experts.{name}" for name in order]
        edit_settings(tmp_path / "adapter", target_parameters=names)
        verify(tmp_path / "adapter", hf_dir, factors)
        assert_same(read_adapter(tmp_path / "adapter", config).factors, factors)


# --- negative controls: the checks fail when something is lost or changed ---


def test_peft_drops_mlp_linears_named_as_modules(
    hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    """Why shared-expert and dense linears are target_parameters: by module name they vanish."""
    factors = make_factors(config, lambda path: "shared_experts" in path or "layers.3.self" in path)
    write(tmp_path / "adapter", factors, config)
    edit_settings(
        tmp_path / "adapter",
        target_modules=list(factors),
        target_parameters=None,
    )
    with pytest.warns(UserWarning):
        got = logits(load_peft_model(tmp_path / "adapter", hf_dir, config))
    attention = {path: pair for path, pair in factors.items() if "self_attn" in path}
    torch.testing.assert_close(got, merged_logits(hf_dir, attention), atol=1e-4, rtol=0)
    assert (got - merged_logits(hf_dir, factors)).abs().max() > 1e-2
    with pytest.raises(AdapterError, match="PEFT"):
        verify(tmp_path / "adapter", hf_dir, factors)


SHARED = "base_model.model.model.layers.3.mlp.shared_experts.up_proj"
EXPERTS = "base_model.model.model.layers.3.mlp.experts"


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def rename_to(new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(f"{SHARED}.lora_B.weight")})


def rank_major_columns(tensors: dict[str, Tensor]) -> None:
    """The columns of B in the other order: expert-major."""
    name = f"{EXPERTS}.lora_B.weight"
    b = tensors[name]
    tensors[name] = b.reshape(len(b), RANK, NUM_EXPERTS).mT.reshape(b.shape).contiguous()


def swap_gate_and_up(tensors: dict[str, Tensor]) -> None:
    name = f"{EXPERTS}.base_layer.lora_B.weight"
    tensors[name] = tensors[name].roll(len(tensors[name]) // 2, 0)


def nudge(tensors: dict[str, Tensor]) -> None:
    tensors[f"{SHARED}.lora_A.weight"][0, 0] += 1e-3


FAULTS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "lost_pair_half": drop(f"{SHARED}.lora_B.weight"),
    "lost_fused": drop(f"{EXPERTS}.base_layer.lora_A.weight"),
    "unknown_name": rename_to("base_model.model.model.layers.3.mlp.shared_experts.lora_B.weight"),
    "column_order": rank_major_columns,
    "gate_up_swapped": swap_gate_and_up,
    "one_value": nudge,
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds(fault: str, hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, KINDS["one_layer"])
    write(tmp_path / "adapter", factors, config)
    verify(tmp_path / "adapter", hf_dir, factors)
    edit_tensors(tmp_path / "adapter", FAULTS[fault])
    with pytest.raises(AdapterError, match="PEFT"):
        verify(tmp_path / "adapter", hf_dir, factors)


def test_verify_finds_wrong_factors(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, KINDS["one_expert"])
    write(tmp_path / "adapter", factors, config)
    path = "model.layers.3.mlp.experts.2.up_proj"
    fewer = {name: pair for name, pair in factors.items() if name != path}
    with pytest.raises(AdapterError, match=f"PEFT changes {path}"):
        verify(tmp_path / "adapter", hf_dir, fewer)
    other_layer = make_factors(config, lambda name: name.startswith("model.layers.2.mlp.experts"))
    with pytest.raises(AdapterError, match="PEFT added"):
        verify(tmp_path / "adapter", hf_dir, other_layer)
    with pytest.raises(AdapterError, match="lacks linears"):
        more = {f"model.layers.3.mlp.experts.{NUM_EXPERTS}.up_proj": factors[path]}
        verify(tmp_path / "adapter", hf_dir, factors | more)
    larger = {
        name: LoraFactors(pair.a, pair.b, pair.scale + 1e-4) for name, pair in factors.items()
    }
    with pytest.raises(AdapterError, match="another delta"):
        verify(tmp_path / "adapter", hf_dir, larger)


def test_a_lost_scaling_pattern_is_found(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, KINDS["expert_gate_up"])
    write(tmp_path / "adapter", factors, config)
    edit_settings(tmp_path / "adapter", alpha_pattern={})
    with pytest.raises(AdapterError, match="another delta"):
        verify(tmp_path / "adapter", hf_dir, factors)
    edit_settings(tmp_path / "adapter", rank_pattern={})
    with pytest.raises(AdapterError, match="PEFT cannot load"):
        verify(tmp_path / "adapter", hf_dir, factors)


def test_missing_peft_has_a_remedy(
    hf_dir: Path, config: Glm5Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(AdapterError, match="pip install"):
        load_peft_model(tmp_path, hf_dir, config)


def test_a_model_that_transformers_computes_otherwise_is_refused(
    hf_dir: Path, config: Glm5Config, tmp_path: Path
) -> None:
    write(tmp_path / "adapter", make_factors(config, KINDS["q_a_proj"]), config)
    half_split = config.model_copy(update={"indexer_rope_interleave": False})
    with pytest.raises(ConfigError, match="indexer_rope_interleave"):
        load_peft_model(tmp_path / "adapter", hf_dir, half_split)


# --- folders that cannot be read ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "r is not supported"),
        ({"r": None}, "r is not supported"),
        ({"r": 65537}, r"r is not supported(?s:.*)less than or equal to 65536"),
        ({"rank_pattern": {"wk": 65537}}, r"rank_pattern.wk is not supported(?s:.*)65536"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": [], "target_parameters": None}, "belong to no target"),
        ({"target_modules": ["q_a_proj", "o_proj"]}, "lacks tensors"),
        ({"r": RANK + 1}, "does not fit"),
    ],
)
def test_read_refuses_settings(
    settings: dict[str, Any], message: str, config: Glm5Config, tmp_path: Path
) -> None:
    write(tmp_path / "adapter", make_factors(config, KINDS["q_a_proj"]), config)
    edit_settings(tmp_path / "adapter", **settings)
    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path / "adapter", config)


@pytest.mark.parametrize("fault", ["lost_pair_half", "lost_fused", "unknown_name"])
def test_read_refuses_tensors(fault: str, config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "adapter", make_factors(config, KINDS["one_layer"]), config)
    edit_tensors(tmp_path / "adapter", FAULTS[fault])
    with pytest.raises(AdapterError, match=r"lora_[AB]\.weight|mlp\.shared_experts\n"):
        read_adapter(tmp_path / "adapter", config)


def test_read_refuses_pickle_and_damage(config: Glm5Config, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(folder, config)
    write(folder, make_factors(config, KINDS["q_a_proj"]), config)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1])
    with pytest.raises(AdapterError, match="damaged"):
        read_adapter(folder, config)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="never loaded"):
        read_adapter(folder, config)
    with pytest.raises(AdapterError, match="never loaded"):
        load_peft_model(folder, folder, config)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda text: "[]", "an object"),
        (lambda text: "", "Invalid JSON"),
        (lambda text: text[: len(text) // 2], "Invalid JSON"),
        (lambda text: f"\ufeff{text}", "Invalid JSON"),
        (lambda text: text.replace('"r":', '"R":'), "no r\n"),
        (lambda text: text.replace('"peft_type":', '"type":'), "no peft_type\n"),
    ],
)
def test_damaged_settings_are_told_so(
    change: Callable[[str], str], got: str, config: Glm5Config, tmp_path: Path
) -> None:
    write(tmp_path / "adapter", make_factors(config, KINDS["q_a_proj"]), config)
    path = tmp_path / "adapter" / SETTINGS
    path.write_text(change(path.read_text()), encoding="utf-8")
    with pytest.raises(
        AdapterError, match=rf"damaged or incomplete(?s:.*){got}(?s:.*)copy or save"
    ):
        read_adapter(tmp_path / "adapter", config)


def test_read_refuses_integer_tensors(config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "adapter", make_factors(config, KINDS["q_a_proj"]), config)
    edit_tensors(tmp_path / "adapter", lambda t: t.update({k: v.long() for k, v in t.items()}))
    with pytest.raises(AdapterError, match="I64"):
        read_adapter(tmp_path / "adapter", config)


# --- what cannot be written ---

PATH = "model.layers.3.self_attn.q_a_proj"


@pytest.mark.parametrize(
    ("path", "a", "b", "message"),
    [
        ("model.layers.4.self_attn.indexer.wk", None, None, "does not have"),  # shared layer
        ("model.layers.5.self_attn.q_a_proj", None, None, "does not have"),  # MTP layer
        ("model.layers.3.mlp.gate", None, None, "does not have"),
        ("lm_head", None, None, "does not have"),
        (PATH, torch.ones(RANK, 33), None, "a has the wrong shape"),
        (PATH, torch.ones(RANK + 1, 32), None, "b has the wrong shape"),
        (PATH, None, torch.ones(RANK, 16), "b has the wrong shape"),
        (PATH, None, torch.ones(16, RANK).half(), "wrong dtype"),
        (PATH, None, torch.full((16, RANK), float("nan")), "NaN"),
    ],
)
def test_write_refuses(
    path: str,
    a: Tensor | None,
    b: Tensor | None,
    message: str,
    config: Glm5Config,
    tmp_path: Path,
) -> None:
    config = config.model_copy(update={"num_nextn_predict_layers": 1})
    pair = LoraFactors(
        torch.ones(RANK, 32) if a is None else a, torch.ones(16, RANK) if b is None else b, 1.0
    )
    with pytest.raises(AdapterError, match=message):
        write(tmp_path / "adapter", {path: pair}, config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_write_refuses_scales(scale: float, config: Glm5Config, tmp_path: Path) -> None:
    pair = LoraFactors(torch.ones(RANK, 32), torch.ones(16, RANK), scale)
    with pytest.raises(AdapterError, match="rank and scale"):
        write(tmp_path / "adapter", {PATH: pair}, config)


def test_write_refuses_nothing_and_a_folder_in_use(config: Glm5Config, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="empty"):
        write(tmp_path / "adapter", {}, config)
    factors = make_factors(config, KINDS["q_a_proj"])
    (tmp_path / "adapter").mkdir()
    write(tmp_path / "adapter", factors, config)
    before = (tmp_path / "adapter" / WEIGHTS).read_bytes()
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write(tmp_path / "adapter", make_factors(config), config)
    assert (tmp_path / "adapter" / WEIGHTS).read_bytes() == before


def test_an_interrupted_write_leaves_nothing(
    config: Glm5Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter_write, "fuse_experts", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "adapter", make_factors(config), config)
    assert not list(tmp_path.iterdir())
