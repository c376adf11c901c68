"""W + scale * B A in the base's dtype, everything else bit for bit, and a plain folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraFactors, read_adapter
from glm5.checkpoint.ckpt_dir import find_checkpoint, read_record
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError
from glm5.export import merged as merged_module
from glm5.export.export import export
from glm5.export.factors import trained_adapter
from glm5.export.merged import merge, merge_checkpoint
from glm5.export.restore import restore_model
from glm5.lora.attach import adapter_pairs
from tests.adapters import make_factors
from tests.checkpoint.test_adapter_serving import LAYOUTS, in_layout
from tests.checkpoint.test_adapter_serving import write as write_serving
from tests.export.conftest import TrainedRun
from tests.exported import (
    SMALL_FILES,
    base_logits,
    config_of,
    distance,
    plain_transformers,
    tensors_of,
    trained_logits,
    transformers_logits,
)
from tests.tiny_models import TinyFolder

BF16 = {"model": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("options", "sections"),
    [({}, {}), ({"dtype": "bfloat16"}, BF16), ({"dtype": "bfloat16", "fp8": True}, BF16)],
    ids=["fp32", "bf16", "fp8"],
)
def test_every_tensor_is_the_base_plus_its_delta(
    tiny_folder: TinyFolder,
    trained_run: TrainedRun,
    tmp_path: Path,
    options: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    base, run_dir = tiny_folder("5", **options), trained_run("5", options, **sections)
    checks = export(run_dir, tmp_path / "out", "merged", weights="bf16")
    assert len(checks) == 2 and all(check.ok for check in checks)
    checkpoint = find_checkpoint(run_dir)
    model = restore_model(checkpoint, read_record(checkpoint), "float32")
    factors = trained_adapter(model, torch.float32).factors
    got = tensors_of(tmp_path / "out")
    with open_checkpoint(base, Glm5Config.from_hf(base)) as reader:
        assert sorted(got) == sorted(reader.names())
        for name in reader.names():
            weight = reader.read(name)
            pair = factors.get(name.removesuffix(".weight"))
            if pair is not None:
                weight = (weight.float() + pair.scale * (pair.b @ pair.a)).to(weight.dtype)
                assert not torch.equal(weight, reader.read(name)), name
            assert got[name].dtype == weight.dtype and torch.equal(got[name], weight), name
    assert {path.name for path in (tmp_path / "out").iterdir()} >= SMALL_FILES
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == options.get("dtype", "float32")


def test_transformers_alone_computes_what_trained(
    tiny_folder: TinyFolder, trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5.2", {})
    export(run_dir, tmp_path / "out", "merged")
    expected = trained_logits(run_dir)
    assert distance(transformers_logits(plain_transformers(tmp_path / "out")), expected) <= 1e-4
    assert distance(base_logits(tiny_folder("5.2")), expected) > 0.05


def test_an_adapter_that_bf16_cannot_hold_is_refused(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5", {"dtype": "bfloat16"}, optimizer={"lr": 1e-6}, **BF16)
    with pytest.raises(CheckFailedError, match=r"too coarse(?s:.*)--as adapter") as caught:
        export(run_dir, tmp_path / "out", "merged")
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def wrong_scale(weight: Tensor, factors: LoraFactors) -> Tensor:
    return merge(weight, LoraFactors(factors.a, factors.b, 1.1 * factors.scale))


def one_left_out(weight: Tensor, factors: LoraFactors) -> Tensor:
    """kv_b_proj's shape is its own."""
    return weight if weight.shape == (224, 24) else merge(weight, factors)


@pytest.mark.parametrize("sabotage", [wrong_scale, one_left_out])
def test_a_merge_that_goes_wrong_publishes_nothing(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Any
) -> None:
    run_dir = trained_run("5", {})
    monkeypatch.setattr(merged_module, "merge", sabotage)
    with pytest.raises(CheckFailedError, match="other logits: merged against adapter"):
        export(run_dir, tmp_path / "out", "merged")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_never_moved_merges(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a first step of a warm-up, whose learning rate is 0."""

    def unmoved(*args: Any, **options: Any) -> Any:
        model = restore_model(*args, **options)
        for _, _, pair in adapter_pairs(model):
            pair.b.data.zero_()
        return model

    monkeypatch.setattr("glm5.export.export.restore_model", unmoved)
    run_dir = trained_run("5", {"dtype": "bfloat16"})
    assert [check.error for check in export(run_dir, tmp_path / "out", "merged")][-1] == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_both_layouts_are_merged_as_they_are_read(
    tiny_folder: TinyFolder, tmp_path: Path, layout: str
) -> None:
    """From a file, pair by pair; whole modules take the base's place."""
    base = tiny_folder("5.2", dtype="bfloat16")
    config = Glm5Config.from_hf(base)
    factors = in_layout(make_factors(config, dtype=torch.bfloat16), layout)
    write_serving(tmp_path / "adapter", factors, "sglang", config)
    router = "model.layers.4.mlp.gate"
    modules = {
        f"{router}.weight": torch.randn(config.n_routed_experts, config.hidden_size),
        f"{router}.e_score_correction_bias": torch.randn(config.n_routed_experts),
    }
    adapter = replace(read_adapter(tmp_path / "adapter", config), modules=modules)
    assert adapter.expert_lora == layout
    merge_checkpoint(base, tmp_path / "merged", config, adapter)
    got, expected = tensors_of(tmp_path / "merged"), tensors_of(base)
    assert got.keys() == expected.keys()
    for path, pair in factors.factors.items():
        weight = expected[f"{path}.weight"]
        delta = pair.scale * (pair.b.float() @ pair.a.float())
        expected[f"{path}.weight"] = (weight.float() + delta).bfloat16()
    for name, tensor in modules.items():
        expected[name] = tensor.to(expected[name].dtype)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_merge_rounds_once() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    merged = merge(
        weight, LoraFactors(torch.tensor([[1.0, 0.5]]), torch.tensor([[0.25], [1.0]]), 2.0)
    )
    assert merged.dtype == torch.bfloat16
    assert merged.tolist() == [[1.5, 2.25], [5.0, 5.0]]
