"""The PEFT folder is what trained, and a folder that PEFT reads otherwise is never published."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glm5.checkpoint.adapter_io import Consumer, LoraAdapter, LoraFactors, read_adapter
from glm5.checkpoint.ckpt_dir import find_checkpoint, read_record
from glm5.config import Glm5Config
from glm5.errors import AdapterError, CheckFailedError, CheckpointError
from glm5.export import adapter as adapter_module
from glm5.export.export import export
from glm5.export.factors import trained_adapter
from glm5.export.restore import restore_model
from tests.adapters import assert_same
from tests.export.conftest import TrainedRun
from tests.exported import (
    base_logits,
    distance,
    plain_transformers,
    trained_logits,
    transformers_logits,
)
from tests.tiny_models import TinyFolder

INDEXER = {"targets": ["wq_b", "wk", "weights_proj", "kv_b_proj"]}


@pytest.mark.parametrize(
    ("variant", "options", "sections"),
    [
        ("5.2", {}, {}),
        ("5.2", {"dtype": "bfloat16"}, {"model": {"dtype": "bfloat16"}}),
        ("5", {"dtype": "bfloat16", "fp8": True}, {"model": {"dtype": "bfloat16"}}),
        (
            "5",
            {"dtype": "bfloat16", "fp8": True},
            {"model": {"dtype": "bfloat16", "base_weights": "fp8"}},
        ),
        ("5.2", {}, {"lora": INDEXER}),
    ],
    ids=["fp32", "bf16", "fp8 base", "trained in float8", "indexer"],
)
def test_the_folder_is_verified_and_holds_what_trained(
    trained_run: TrainedRun,
    tmp_path: Path,
    variant: str,
    options: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    run_dir = trained_run(variant, options, **sections)
    (check,) = export(run_dir, tmp_path / "out", "adapter")
    assert check.ok and check.error <= check.limit == 1e-4
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    dtype = torch.bfloat16 if "model" in sections else torch.float32
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    checkpoint = find_checkpoint(run_dir)
    model = restore_model(checkpoint, read_record(checkpoint), "float32")
    factors = trained_adapter(model, dtype).factors
    path = "model.layers.0.self_attn.kv_b_proj"
    for side, factor in (("A", factors[path].a), ("B", factors[path].b)):
        name = f"base_model.model.{path}.lora_{side}.weight"
        assert torch.equal(saved[name], factor) and factor.abs().sum() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_base_that_was_quantised_for_training(trained_run: TrainedRun, tmp_path: Path) -> None:
    """The adapter is right on the quantised weights; how far the folder's own are away is told."""
    sections = {"model": {"dtype": "bfloat16", "base_weights": "fp8"}}
    run_dir = trained_run("5", {"dtype": "bfloat16"}, **sections)
    check, plain = export(run_dir, tmp_path / "out", "adapter")
    assert check.error <= check.limit == 1e-4
    assert plain.limit is None and plain.error > 0.05 and "not quantised" in plain.what


def test_peft_computes_what_the_checkpoint_computes(
    tiny_folder: TinyFolder, trained_run: TrainedRun, tmp_path: Path
) -> None:
    from peft import PeftModel

    run_dir, base = trained_run("5.2", {}), tiny_folder("5.2")
    export(run_dir, tmp_path / "out", "adapter")
    model = PeftModel.from_pretrained(plain_transformers(base), str(tmp_path / "out"))
    expected = trained_logits(run_dir)
    assert distance(transformers_logits(model.eval()), expected) <= 1e-4
    assert distance(base_logits(base), expected) > 0.05


Factors = Mapping[str, LoraFactors]


def scaled(factors: Factors) -> Factors:
    """One pair of many is too large."""
    path = "model.layers.4.mlp.experts.3.down_proj"
    pair = factors[path]
    return {**factors, path: LoraFactors(pair.a, 1.5 * pair.b, pair.scale)}


def dropped(factors: Factors) -> Factors:
    """One pair of many is lost."""
    return {path: pair for path, pair in factors.items() if path != "model.layers.0.mlp.up_proj"}


@pytest.mark.parametrize("consumer", ["peft", "sglang"])
@pytest.mark.parametrize("sabotage", [scaled, dropped])
def test_a_writer_that_goes_wrong_publishes_nothing(
    trained_run: TrainedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Factors], Factors],
    consumer: Consumer,
) -> None:
    name = "write_peft_adapter" if consumer == "peft" else "write_serving_adapter"
    right = getattr(adapter_module, name)

    def write(folder: Path, adapter: LoraAdapter, *args: Any, **options: Any) -> Any:
        wrong = replace(adapter, factors=sabotage(adapter.factors))
        return right(folder, wrong, *args, **options)

    monkeypatch.setattr(adapter_module, name, write)
    with pytest.raises(CheckFailedError) as caught:
        export(trained_run("5.2", {}), tmp_path / "out", "adapter", consumer)
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_factors_that_are_not_the_models_are_seen_in_the_logits(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and PEFT agree, the model does not: only the logits can tell."""

    def wrong(*args: Any) -> LoraAdapter:
        found = trained_adapter(*args)
        factors = {
            path: LoraFactors(pair.a, 1.1 * pair.b, pair.scale)
            for path, pair in found.factors.items()
        }
        return replace(found, factors=factors)

    monkeypatch.setattr(adapter_module, "trained_adapter", wrong)
    with pytest.raises(CheckFailedError, match="computes other logits"):
        export(trained_run("5.2", {}), tmp_path / "out", "adapter")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_exported_for_an_engine(
    trained_run: TrainedRun, tmp_path: Path, dtype: str
) -> None:
    run_dir = trained_run("5.2", {"dtype": dtype}, model={"dtype": dtype})
    (check,) = export(run_dir, tmp_path / "out", "adapter", "sglang")
    assert check.ok and check.error == 0.0
    checkpoint = find_checkpoint(run_dir)
    model = restore_model(checkpoint, read_record(checkpoint), "float32")
    expected = trained_adapter(model, getattr(torch, dtype)).factors
    assert_same(read_adapter(tmp_path / "out", model.config.glm5).factors, expected)


def test_an_engine_that_would_drop_a_linear_gets_no_folder(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5.2", {})
    with pytest.raises(
        AdapterError, match=r"vllm does not serve adapters of kv_b_proj(?s:.*)--without"
    ):
        export(run_dir, tmp_path / "out", "adapter", "vllm")
    assert list(tmp_path.iterdir()) == []


def test_a_linear_is_left_out_for_an_engine_on_purpose_alone(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5.2", {})
    export(run_dir, tmp_path / "out", "adapter", "vllm", without=["kv_b_proj"])
    factors = read_adapter(tmp_path / "out", Glm5Config.from_hf_dict(config_of(run_dir))).factors
    assert factors and not any(path.endswith("kv_b_proj") for path in factors)
    with pytest.raises(AdapterError, match=r"does not have(?s:.*)k_proj"):
        export(run_dir, tmp_path / "no", "adapter", "vllm", without=["k_proj"])
    with pytest.raises(CheckpointError, match="that an engine serves"):
        export(run_dir, tmp_path / "no", "adapter", without=["kv_b_proj"])


def config_of(run_dir: Path) -> dict[str, Any]:
    return read_record(find_checkpoint(run_dir)).config


def test_for_an_engine_is_no_way_to_merge(trained_run: TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="says nothing of --as merged"):
        export(trained_run("5.2", {}), tmp_path / "out", "merged", "vllm")
