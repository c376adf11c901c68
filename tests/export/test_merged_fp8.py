"""Merged into block-scaled float8: blocks without a change keep their bytes; loss is limited."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraAdapter, LoraFactors
from glm5.checkpoint.ckpt_dir import find_checkpoint, read_record
from glm5.checkpoint.fp8 import SCALE_SUFFIX, open_checkpoint
from glm5.checkpoint.fp8_config import quantisable_names
from glm5.checkpoint.load import load_model
from glm5.checkpoint.requantise import add_to_blocks
from glm5.checkpoint.to_megatron import convert
from glm5.cli.verify import verify_checkpoint
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError, CheckpointError
from glm5.export.check import share_lost
from glm5.export.export import Form, export
from glm5.export.factors import trained_adapter
from glm5.export.merged import MergedWeights, merge_checkpoint
from glm5.export.restore import restore_model
from glm5.model.forward import logits
from glm5.model.transformer_config import BaseWeights
from glm5.ops.block_scaled import BlockScaled, quantise
from tests.adapters import make_factors
from tests.checkpoint.test_requantise import same, same_folder
from tests.export.conftest import TrainedRun
from tests.exported import (
    SMALL_FILES,
    base_logits,
    config_of,
    tensors_of,
    trained_logits,
)
from tests.hf_folders import rewrite
from tests.tiny_models import TinyFolder, draw_tokens

PLAIN: dict[str, Any] = {"dtype": "bfloat16"}
FP8 = {"dtype": "bfloat16", "fp8": True}
# Float8 takes more than half of what the other tests' rate gives: docs/log.md has the shares.
LARGE: dict[str, Any] = {
    "model": {"dtype": "bfloat16"},
    "optimizer": {"lr": 0.1, "schedule": "constant"},
}
GATE = "model.layers.0.mlp.gate_proj"  # 160 rows: two blocks, the last one ragged


def merged(base: Path, folder: Path, adapter: LoraAdapter) -> dict[str, Tensor]:
    merge_checkpoint(base, folder, Glm5Config.from_hf(base), adapter, "fp8")
    return tensors_of(folder)


def stored(tensors: dict[str, Tensor], name: str) -> BlockScaled:
    return BlockScaled(tensors[name], tensors[name + SCALE_SUFFIX])


def test_an_adapter_of_zeros_changes_no_bit(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("5.2", **FP8)
    factors = make_factors(Glm5Config.from_hf(base))
    zero = {
        path: LoraFactors(pair.a, torch.zeros_like(pair.b), pair.scale)
        for path, pair in factors.items()
    }
    got = merged(base, tmp_path / "hf", LoraAdapter(zero, "per_expert"))
    assert same_folder(got, tensors_of(base))


def test_a_change_in_one_linear_leaves_all_others_and_its_other_blocks(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder("5", **FP8)
    before = tensors_of(base)
    a, b = torch.randn(2, 64), torch.zeros(160, 2)
    b[150:] = torch.randn(10, 2)
    adapter = LoraAdapter({GATE: LoraFactors(a, b, 0.5)}, "none")
    got = merged(base, tmp_path / "hf", adapter)
    name = f"{GATE}.weight"
    differ = {n for n in before if not same(got[n], before[n])}
    assert got.keys() == before.keys() and differ == {name, name + SCALE_SUFFIX}
    assert same(got[name][:128], before[name][:128])
    assert torch.equal(got[name + SCALE_SUFFIX][0], before[name + SCALE_SUFFIX][0])
    summed = stored(before, name).dequantise(torch.float32)[128:] + 0.5 * (b @ a)[128:]
    scaled = quantise(summed)
    assert same(got[name][128:], scaled.values)
    assert torch.equal(got[name + SCALE_SUFFIX][1:], scaled.scales)


def test_what_a_release_keeps_in_its_dtype_is_rounded_to_that(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder("5", **FP8)
    path = "model.layers.1.self_attn.indexer.weights_proj"
    router, new = "model.layers.1.mlp.gate.weight", torch.randn(8, 64)
    pair = LoraFactors(torch.randn(2, 64), torch.randn(16, 2), 1.0)
    got = merged(base, tmp_path / "hf", LoraAdapter({path: pair}, "none", {router: new}))
    before = tensors_of(base)
    expected = (before[f"{path}.weight"].float() + pair.b @ pair.a).bfloat16()
    assert same(got[f"{path}.weight"], expected) and same(got[router], new.bfloat16())


IN_FLOAT8 = LARGE | {"model": {"dtype": "bfloat16", "base_weights": "fp8", "fp8_compute": True}}


@pytest.mark.parametrize(
    ("variant", "sections"),
    [("5", LARGE), ("5.2", LARGE), ("5", IN_FLOAT8)],
    ids=["5", "5.2", "trained in float8"],
)
def test_an_fp8_base_stays_fp8(
    tiny_folder: TinyFolder,
    trained_run: TrainedRun,
    tmp_path: Path,
    variant: str,
    sections: dict[str, Any],
) -> None:
    base, out = tiny_folder(variant, **FP8), tmp_path
    run_dir = trained_run(variant, FP8, **sections)
    checks = export(run_dir, out / "hf", "merged")
    assert all(check.ok for check in checks) and 0 < checks[-1].error <= 0.5
    before, got = tensors_of(base), tensors_of(out / "hf")
    checkpoint = find_checkpoint(run_dir)
    adapter = trained_adapter(
        restore_model(checkpoint, read_record(checkpoint), "float32"), torch.float32
    )
    for path, pair in adapter.factors.items():
        name = f"{path}.weight"
        expected = add_to_blocks(stored(before, name), pair.scale * (pair.b @ pair.a))
        before[name], before[name + SCALE_SUFFIX] = expected.values, expected.scales
    assert same_folder(got, before)
    assert {path.name for path in (out / "hf").iterdir()} >= SMALL_FILES
    assert config_of(out / "hf")["quantization_config"] == config_of(base)["quantization_config"]


def test_glm5_loads_converts_and_verifies_it(
    tiny_folder: TinyFolder, trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5", FP8, **LARGE)
    (share,) = export(run_dir, tmp_path / "hf", "merged")[-1:]
    with torch.no_grad():
        got = logits(load_model(tmp_path / "hf", dtype="float32"), draw_tokens(40))
    adapted, base = trained_logits(run_dir), base_logits(tiny_folder("5", **FP8))
    # by norms: one near-tie of a router may move a row as far as the adapter does
    assert share_lost(got, adapted, base) < 0.5
    assert share.what == "share of the adapter lost to rounding"
    convert(tmp_path / "hf", tmp_path / "ckpt")
    assert verify_checkpoint(str(tmp_path / "hf")).ok


def test_a_bf16_base_is_quantised_on_the_way(
    tiny_folder: TinyFolder, trained_run: TrainedRun, tmp_path: Path
) -> None:
    base, run_dir = tiny_folder("5", **PLAIN), trained_run("5", PLAIN, **LARGE)
    export(run_dir, tmp_path / "hf", "merged", weights="fp8")
    checkpoint = find_checkpoint(run_dir)
    model = restore_model(checkpoint, read_record(checkpoint), "float32")
    factors = trained_adapter(model, torch.float32).factors
    before, got = tensors_of(base), tensors_of(tmp_path / "hf")
    quantised = {name.removesuffix(SCALE_SUFFIX) for name in got if name.endswith(SCALE_SUFFIX)}
    assert len(quantised) > 50 and got.keys() == before.keys() | {
        n + SCALE_SUFFIX for n in quantised
    }
    for name, weight in before.items():
        pair = factors.get(name.removesuffix(".weight"))
        summed = weight.float() if pair is None else weight.float() + pair.scale * (pair.b @ pair.a)
        if name in quantised:
            expected = quantise(summed)
            assert same(got[name], expected.values), name
            assert torch.equal(got[name + SCALE_SUFFIX], expected.scales), name
        else:
            assert same(got[name], summed.to(weight.dtype)), name
    kept = config_of(tmp_path / "hf")["quantization_config"]["modules_to_not_convert"]
    assert {name.rpartition(".")[0] for name in before.keys() - quantised} == set(kept)
    glm5 = Glm5Config.from_hf(tmp_path / "hf")
    with open_checkpoint(tmp_path / "hf", glm5) as reader:
        assert sorted(reader.names()) == sorted(before)


@pytest.mark.parametrize("weights", [None, "bf16", "fp8"])
def test_a_base_that_was_quantised_for_training_is_merged_so(
    tiny_folder: TinyFolder, trained_run: TrainedRun, tmp_path: Path, weights: MergedWeights | None
) -> None:
    """What trained is the sum with the quantised weights: those are written, not the folder's."""
    sections = LARGE | {"model": {"dtype": "bfloat16", "base_weights": "fp8"}}
    base, run_dir = tiny_folder("5", **PLAIN), trained_run("5", PLAIN, **sections)
    checks = export(run_dir, tmp_path / "hf", "merged", weights=weights)
    assert all(check.ok for check in checks) and 0 < checks[-1].error <= 0.5
    checkpoint = find_checkpoint(run_dir)
    model = restore_model(checkpoint, read_record(checkpoint), "float32")
    factors = trained_adapter(model, torch.float32).factors
    before, got = tensors_of(base), tensors_of(tmp_path / "hf")
    for name in quantisable_names(Glm5Config.from_hf(base)):
        pair = factors.get(name.removesuffix(".weight"))
        held = quantise(before[name])
        if weights == "fp8":
            expected = held if pair is None else add_to_blocks(held, pair.scale * (pair.b @ pair.a))
            assert same(got[name], expected.values), name
            assert torch.equal(got[name + SCALE_SUFFIX], expected.scales), name
        else:
            plain = held.dequantise(torch.bfloat16)
            if pair is not None:
                plain = (plain.float() + pair.scale * (pair.b @ pair.a)).bfloat16()
            assert same(got[name], plain), name


def one_left_in_bf16(source: Path, target: Path) -> Path:
    """A release whose first o_proj is not float8."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[LEFT] = stored(tensors, LEFT).dequantise(torch.bfloat16) * 1.01
        del tensors[LEFT + SCALE_SUFFIX]

    return rewrite(source, target, change)


LEFT = "model.layers.0.self_attn.o_proj.weight"


def test_what_a_release_leaves_in_bf16_stays_so_with_the_values_that_trained(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = one_left_in_bf16(tiny_folder("5", **FP8), tmp_path / "base")
    glm5, before = Glm5Config.from_hf(base), tensors_of(base)
    nothing = LoraAdapter({}, "none")
    kinds: tuple[BaseWeights, ...] = ("dtype", "fp8")
    for base_weights in kinds:
        merge_checkpoint(base, tmp_path / base_weights, glm5, nothing, "fp8", base_weights)
        got = tensors_of(tmp_path / base_weights)
        held = quantise(before[LEFT]).dequantise(torch.bfloat16)
        expected = before[LEFT] if base_weights == "dtype" else held
        assert same(got[LEFT], expected) and not same(held, before[LEFT])
        assert same_folder(got, before | {LEFT: expected})


def test_an_adapter_that_float8_cannot_hold_is_refused_and_bf16_named(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5", FP8, **(LARGE | {"optimizer": {"lr": 1e-3}}))
    with pytest.raises(CheckFailedError, match=r"float8 is too coarse(?s:.*)--weights bf16"):
        export(run_dir, tmp_path / "out", "merged")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("form", "sections"), [("adapter", {}), ("hf", {"lora": None})])
def test_weights_are_for_merged(
    trained_run: TrainedRun, tmp_path: Path, form: Form, sections: dict[str, Any]
) -> None:
    optimizer = {"optimizer": {"lr": 1e-3}} if sections else {}
    run_dir = trained_run("5", {}, **sections, **optimizer)
    with pytest.raises(CheckpointError, match=r"--weights fp8 says nothing of --as"):
        export(run_dir, tmp_path / "out", form, weights="fp8")
    assert list(tmp_path.iterdir()) == []


def test_the_latent_eps_goes_along(trained_run: TrainedRun, tmp_path: Path) -> None:
    """The config of a base that is quantised on the way is made anew."""
    run_dir = trained_run(
        "5", PLAIN, **(LARGE | {"model": {"dtype": "bfloat16", "latent_norm_eps": 1e-2}})
    )
    export(run_dir, tmp_path / "hf", "merged", weights="fp8")
    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert written["latent_norm_eps"] == 1e-2 and "quantization_config" in written
