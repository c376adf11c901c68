"""What SGLang and vLLM would add to the weights is what trained, in both layouts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.checkpoint import adapter_serving
from glm5.checkpoint.adapter_io import (
    Engine,
    LoraAdapter,
    LoraFactors,
    ServingReport,
    adapter_linears,
    check_serving_adapter,
    compare_adapters,
    read_adapter,
    write_serving_adapter,
)
from glm5.config import Glm5Config
from glm5.errors import AdapterError, CheckFailedError
from tests import engine_loaders
from tests.adapters import (
    KINDS,
    NUM_EXPERTS,
    RANK,
    SETTINGS,
    WEIGHTS,
    Factors,
    adapter_of,
    assert_same,
    make_factors,
)

ENGINES: tuple[Engine, ...] = ("sglang", "vllm")
UNSERVED = {"sglang": (), "vllm": ("kv_b_proj", "wk", "weights_proj")}
LAYOUTS = ("per_expert", "shared_outer")
SERVED_KINDS = sorted(KINDS.keys() - {"kv_b_proj"})


def served(engine: Engine, kind: str) -> Callable[[str], bool]:
    return lambda path: KINDS[kind](path) and not path.endswith(UNSERVED[engine])


def shared_outer(factors: Factors) -> LoraAdapter:
    """One a for the gates of a layer, one for its ups, one b for its downs."""
    firsts: dict[tuple[str, str], LoraFactors] = {}
    shared: Factors = {}
    for path, pair in factors.items():
        shared[path] = pair
        if ".mlp.experts." in path:
            owner, _, leaf = path.rsplit(".", 2)
            first = firsts.setdefault((owner, leaf), pair)
            a, b = (pair.a, first.b) if leaf == "down_proj" else (first.a, pair.b)
            shared[path] = LoraFactors(a, b, pair.scale)
    adapter = adapter_of(shared)
    return replace(adapter, expert_lora="shared_outer") if firsts else adapter


def in_layout(factors: Factors, layout: str) -> LoraAdapter:
    return adapter_of(factors) if layout == "per_expert" else shared_outer(factors)


def write(folder: Path, adapter: LoraAdapter, engine: Engine, config: Glm5Config) -> ServingReport:
    return write_serving_adapter(folder, adapter, engine, config=config, base_name="tiny")


def assert_served(
    folder: Path, adapter: LoraAdapter, engine: Engine, config: Glm5Config, rtol: float = 1e-12
) -> None:
    """The engine adds exactly the adapter's deltas, and nothing elsewhere."""
    deltas = engine_loaders.load(folder, engine, config)
    assert adapter.factors.keys() <= deltas.keys()
    for path, delta in deltas.items():
        pair = adapter.factors.get(path)
        if pair is None:
            assert not delta.any(), path
            continue
        expected = pair.scale * (pair.b.double() @ pair.a.double())
        scale = float(pair.scale * (pair.b.double().abs() @ pair.a.double().abs()).max())
        assert scale > 0
        torch.testing.assert_close(delta, expected, atol=rtol * scale, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_the_engine_adds_what_trained(
    kind: str, engine: Engine, layout: str, config: Glm5Config, tmp_path: Path
) -> None:
    if kind == "indexer" and engine == "vllm":
        kind = "one_layer"
    adapter = in_layout(make_factors(config, served(engine, kind)), layout)
    report = write(tmp_path / "out", adapter, engine, config)
    assert report.num_rounded == 0 and report.rank == RANK
    assert_served(tmp_path / "out", adapter, engine, config)
    read = read_adapter(tmp_path / "out", config)
    assert read.expert_lora == adapter.expert_lora
    # experts that share a factor with an adapted one have it, too, beside zeros
    others = read.factors.keys() - adapter.factors.keys()
    assert not others or adapter.expert_lora == "shared_outer"
    assert not any((read.factors[path].b @ read.factors[path].a).any() for path in others)
    assert_same({path: read.factors[path] for path in adapter.factors}, adapter.factors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes(layout: str, dtype: torch.dtype, config: Glm5Config, tmp_path: Path) -> None:
    adapter = in_layout(make_factors(config, served("vllm", "all"), dtype), layout)
    write(tmp_path / "out", adapter, "vllm", config)
    saved = load_file(tmp_path / "out" / WEIGHTS)
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    assert_served(tmp_path / "out", adapter, "vllm", config)
    assert_same(read_adapter(tmp_path / "out", config).factors, adapter.factors)


def test_names_and_settings(config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "out", shared_outer(make_factors(config)), "sglang", config)
    saved = load_file(tmp_path / "out" / WEIGHTS)
    prefix, (r, n, h, i) = "base_model.model.model.layers.3.mlp", (RANK, NUM_EXPERTS, 32, 24)
    shapes = {
        f"{prefix}.experts.w1.lora_A.weight": (1, r, h),
        f"{prefix}.experts.w1.lora_B.weight": (n, i, r),
        f"{prefix}.experts.w3.lora_A.weight": (1, r, h),
        f"{prefix}.experts.w3.lora_B.weight": (n, i, r),
        f"{prefix}.experts.w2.lora_A.weight": (n, r, i),
        f"{prefix}.experts.w2.lora_B.weight": (1, h, r),
        f"{prefix}.shared_experts.gate_proj.lora_A.weight": (r, h),
    }
    assert {name: tuple(saved[name].shape) for name in shapes} == shapes
    settings = json.loads((tmp_path / "out" / SETTINGS).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 5, "LORA")
    assert settings["target_modules"] == sorted({p.split(".")[-1] for p in make_factors(config)})
    assert settings["base_model_name_or_path"] == "tiny"


def test_shared_factors_are_one_object_when_read(config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "out", shared_outer(make_factors(config)), "sglang", config)
    factors = dict(read_adapter(tmp_path / "out", config).factors.items())
    owner = "model.layers.2.mlp.experts"
    for leaf, side in (("gate_proj", "a"), ("up_proj", "a"), ("down_proj", "b")):
        held = {id(getattr(factors[f"{owner}.{e}.{leaf}"], side)) for e in range(NUM_EXPERTS)}
        assert len(held) == 1


def mixed(config: Glm5Config) -> Factors:
    """Ranks 1 to 4 and scales 2, 1 and 0.3 by turns."""
    factors: Factors = {}
    for i, path in enumerate(make_factors(config)):
        m, n = adapter_linears(config)[path]
        rank, scale = 1 + i % 4, (2.0, 2.0, 1.0, 0.3)[i % 4]
        factors[path] = LoraFactors(torch.randn(rank, n), torch.randn(m, rank), scale)
    return factors


def test_one_rank_and_one_scale(config: Glm5Config, tmp_path: Path) -> None:
    adapter = adapter_of(mixed(config))
    report = write(tmp_path / "out", adapter, "sglang", config)
    assert (report.rank, report.alpha) == (4, 8)
    count = len(adapter.factors)
    # a ratio of 1/2 is exact, 0.15 is not
    assert report.num_rounded == sum(pair.scale == 0.3 for pair in adapter.factors.values()) > 0
    assert report.num_filled == 0 and report.num_tensors == 2 * count
    assert_served(tmp_path / "out", adapter, "sglang", config, rtol=1e-7)
    read = read_adapter(tmp_path / "out", config)
    error, limit = compare_adapters(read, adapter)
    assert 0 < error <= limit < 1e-7
    for path, pair in adapter.factors.items():
        got = read.factors[path]
        rank = pair.a.shape[0]
        assert torch.equal(got.a[:rank], pair.a) and not got.a[rank:].any()
        if pair.scale != 0.3:
            assert torch.equal(got.scale * got.b[:, :rank], pair.scale * pair.b)


def test_rslora_scales_are_served(config: Glm5Config, tmp_path: Path) -> None:
    factors = {
        path: LoraFactors(pair.a, pair.b, 16 / RANK**0.5)
        for path, pair in make_factors(config).items()
    }
    report = write(tmp_path / "out", adapter_of(factors), "sglang", config)
    assert report.alpha / RANK == pytest.approx(16 / RANK**0.5, rel=1e-15)
    assert report.num_rounded == 0
    assert_served(tmp_path / "out", adapter_of(factors), "sglang", config)


def test_what_is_filled_is_told(config: Glm5Config, tmp_path: Path) -> None:
    """q_a alone wants kv_a; one projection of one expert wants the whole layer."""
    one = "model.layers.2.mlp.experts.4.up_proj"
    factors = make_factors(config, lambda path: path.endswith(".q_a_proj") or path == one)
    report = write(tmp_path / "out", adapter_of(factors), "vllm", config)
    assert report.num_filled == config.num_hidden_layers + 3 * NUM_EXPERTS - 1
    assert_served(tmp_path / "out", adapter_of(factors), "vllm", config)


# --- forms that others write ---


def test_reads_shared_sides_beside_single_experts(config: Glm5Config, tmp_path: Path) -> None:
    """As miles exports: the shared side once, the others one by one, and no prefix."""
    adapter = shared_outer(make_factors(config, KINDS["routed_experts"]))
    write(tmp_path / "out", adapter, "sglang", config)
    saved = load_file(tmp_path / "out" / WEIGHTS)
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    mixed_form = {}
    for name, tensor in saved.items():
        owner, short, side, _ = name.removeprefix("base_model.model.").rsplit(".", 3)
        if len(tensor) == 1:
            mixed_form[f"{owner}.{names[short]}.{side}.weight"] = tensor
            continue
        for expert, own in enumerate(tensor):
            mixed_form[f"{owner}.{expert}.{names[short]}.{side}.weight"] = own.clone()
    save_file(mixed_form, tmp_path / "out" / WEIGHTS)
    read = read_adapter(tmp_path / "out", config)
    assert read.expert_lora == "shared_outer"
    assert_same(read.factors, adapter.factors)


def test_reads_engine_names_of_experts(config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, KINDS["routed_experts"])
    write(tmp_path / "out", adapter_of(factors), "sglang", config)
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    renamed = {}
    for name, tensor in load_file(tmp_path / "out" / WEIGHTS).items():
        owner, leaf, side, _ = name.rsplit(".", 3)
        renamed[f"{owner}.{names[leaf]}.{side}.weight"] = tensor
    save_file(renamed, tmp_path / "out" / WEIGHTS)
    assert_same(read_adapter(tmp_path / "out", config).factors, factors)


# --- files that nobody writes ---


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        ("layers.2.mlp.experts.gate_up_proj", (NUM_EXPERTS, RANK, 32), "of a linear"),
        ("layers.2.mlp.experts.w4", (NUM_EXPERTS, RANK, 32), "of a linear"),
        ("layers.2.mlp.experts.w1", (), "does not fit"),
        ("layers.2.mlp.experts.w1", (NUM_EXPERTS,), "does not fit"),
        ("layers.2.mlp.experts.w1", (NUM_EXPERTS, RANK), "does not fit"),
        ("layers.2.mlp.experts.w2", (0, RANK, 24), "does not fit"),
        ("layers.foo.self_attn.o_proj", (RANK, 32), "does not have"),
        ("layers", (RANK, 32), "does not have"),
    ],
)
def test_reads_no_odd_names_and_shapes(
    module: str, shape: tuple[int, ...], message: str, config: Glm5Config, tmp_path: Path
) -> None:
    """Each one alone and beside good pairs; told as the reader and the engine's check see it."""
    write(tmp_path / "out", adapter_of(make_factors(config, KINDS["q_a_proj"])), "sglang", config)
    good = load_file(tmp_path / "out" / WEIGHTS)
    odd = {
        f"base_model.model.model.{module}.lora_{side}.weight": torch.ones(shape) for side in "AB"
    }
    for tensors in (odd, good | odd):
        save_file(tensors, tmp_path / "out" / WEIGHTS)
        with pytest.raises(AdapterError, match=message):
            read_adapter(tmp_path / "out", config)
        for engine in ENGINES:
            with pytest.raises(AdapterError, match="would not serve"):
                check_serving_adapter(tmp_path / "out", engine, config)


# --- what cannot be written ---


@pytest.mark.parametrize(
    ("name", "engine", "reason"),
    [
        ("kv_b_proj", "vllm", "absorbed decode"),
        ("wk", "vllm", "fuses wk"),
        ("weights_proj", "vllm", "fuses wk"),
    ],
)
def test_refuses_what_the_engine_does_not_serve(
    name: str, engine: Engine, reason: str, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, lambda path: path.endswith(f".{name}"))
    with pytest.raises(AdapterError, match=rf"{name}(?s:.*){reason}(?s:.*)--as merged"):
        write(tmp_path / "out", adapter_of(factors), engine, config)
    assert not list(tmp_path.iterdir())
    with pytest.raises(engine_loaders.RejectedError):
        write(tmp_path / "out", adapter_of(factors), "sglang", config)
        engine_loaders.load(tmp_path / "out", engine, config)


def test_refuses_modules_and_ranks(config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, KINDS["q_a_proj"])
    norm = {"model.norm.weight": torch.ones(32)}
    with pytest.raises(AdapterError, match=r"no whole modules(?s:.*)model.norm(?s:.*)--as merged"):
        write(tmp_path / "out", adapter_of(factors, norm), "sglang", config)
    wide = make_factors(config, KINDS["q_a_proj"], rank=513)
    with pytest.raises(AdapterError, match=r"rank(?s:.*)513(?s:.*)at most 512"):
        write(tmp_path / "out", adapter_of(wide), "vllm", config)
    write(tmp_path / "out", adapter_of(wide), "sglang", config)


def test_refuses_shared_factors_that_are_not(config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, KINDS["expert_down"])
    claimed = replace(adapter_of(factors), expert_lora="shared_outer")
    with pytest.raises(AdapterError, match=r"do not share lora_B"):
        write(tmp_path / "out", claimed, "sglang", config)
    shared = shared_outer(factors)
    path = "model.layers.2.mlp.experts.1.down_proj"
    pair = shared.factors[path]
    other = {**shared.factors, path: LoraFactors(pair.a, pair.b, 2 * pair.scale)}
    with pytest.raises(AdapterError, match="several ranks or scales"):
        write(tmp_path / "out", replace(shared, factors=other), "sglang", config)
    assert not list(tmp_path.iterdir())


def test_refuses_a_layout_that_the_linears_contradict(config: Glm5Config, tmp_path: Path) -> None:
    for kind, layout in (("routed_experts", "none"), ("attention", "per_expert")):
        adapter: Any = replace(adapter_of(make_factors(config, KINDS[kind])), expert_lora=layout)
        with pytest.raises(AdapterError, match="expert_lora contradicts"):
            write(tmp_path / "out", adapter, "sglang", config)


def test_a_writer_that_goes_wrong_publishes_nothing(
    config: Glm5Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = make_factors(config, KINDS["q_a_proj"])
    monkeypatch.setattr(adapter_serving, "_with_partners", lambda specs, config: set(specs))
    with pytest.raises(AdapterError, match=r"q_a_proj without(?s:.*)kv_a_proj_with_mqa"):
        write(tmp_path / "out", adapter_of(factors), "sglang", config)
    assert not list(tmp_path.iterdir())


# --- what was written is compared ---


def changed_b(factors: Factors, path: str) -> Factors:
    pair = factors[path]
    return factors | {path: LoraFactors(pair.a, 1.001 * pair.b, pair.scale)}


def changed_a(factors: Factors, path: str) -> Factors:
    pair = factors[path]
    return factors | {path: LoraFactors(1.001 * pair.a, pair.b, pair.scale)}


def changed_scale(factors: Factors, path: str) -> Factors:
    pair = factors[path]
    return factors | {path: LoraFactors(pair.a, pair.b, 1.001 * pair.scale)}


def lost(factors: Factors, path: str) -> Factors:
    return {name: pair for name, pair in factors.items() if name != path}


@pytest.mark.parametrize("fault", [changed_a, changed_b, changed_scale, lost])
def test_a_comparison_finds(fault: Callable[[Factors, str], Factors], config: Glm5Config) -> None:
    factors = make_factors(config, KINDS["one_layer"])
    path = "model.layers.3.mlp.experts.2.up_proj"
    assert compare_adapters(adapter_of(factors), adapter_of(factors))[0] == 0.0
    with pytest.raises(CheckFailedError, match=path):
        compare_adapters(adapter_of(fault(factors, path)), adapter_of(factors))
    if fault is lost:
        with pytest.raises(CheckFailedError, match=path):
            compare_adapters(adapter_of(factors), adapter_of(fault(factors, path)))


def test_a_comparison_sees_modules(config: Glm5Config) -> None:
    factors, name = make_factors(config, KINDS["q_a_proj"]), "model.norm.weight"
    left = adapter_of(factors, {name: torch.ones(32)})
    for other in ({}, {name: torch.zeros(32)}):
        with pytest.raises(CheckFailedError, match=r"modules|norm"):
            compare_adapters(left, adapter_of(factors, other))
