"""Checkpoints go through Megatron-Bridge without losing a bit, and none that does not fit."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.bridge import AutoBridge
from safetensors.torch import save_file
from transformers import AutoConfig

from glm5 import Glm5Config, load_model, logits
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.glm5_rules import mtp_hf_names
from glm5.errors import CheckpointError, ConfigError
from glm5.integrations.bridge.source import read_config
from tests.bridge.models import assert_same_bits, bridged, exported, provider_of, tensors_of
from tests.tiny_models import VARIANTS, TinyFolder, draw_tokens


def without_mtp(folder: Path) -> dict[str, torch.Tensor]:
    left_out = set(mtp_hf_names(Glm5Config.from_hf(folder)))
    return {name: t for name, t in tensors_of(folder).items() if name not in left_out}


def rewritten(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint folder with these tensors, in one file."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_keeps_every_bit(tiny_folder: TinyFolder, variant: str) -> None:
    bridge, model = bridged(tiny_folder(variant))
    assert_same_bits(exported(bridge, model), without_mtp(tiny_folder(variant)))


def test_round_trip_in_bf16_and_with_mtp(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5.2", dtype="bfloat16")
    bridge, model = bridged(folder, mtp_num_layers=1)
    assert_same_bits(exported(bridge, model), tensors_of(folder))


def test_saved_folder_is_the_checkpoint(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5.2")
    bridge, model = bridged(folder)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_bits(tensors_of(tmp_path / "out"), without_mtp(folder))
    assert Glm5Config.from_hf(tmp_path / "out") == Glm5Config.from_hf(folder)


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_logits_are_those_of_our_own_loader(tiny_folder: TinyFolder, variant: str) -> None:
    tokens = draw_tokens(40)
    _, (model,) = bridged(tiny_folder(variant))
    own = load_model(tiny_folder(variant))
    with torch.no_grad():
        assert torch.equal(logits(model.eval(), tokens), logits(own, tokens))


def test_fp8_is_dequantised(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5.2", fp8=True)
    bridge, model = bridged(folder)
    config = Glm5Config.from_hf(folder)
    reader = open_checkpoint(folder, config)
    left_out = set(mtp_hf_names(config))
    plain = {name: reader.read(name) for name in reader.names() if name not in left_out}
    assert any(tensors_of(folder)[name].dtype == torch.float8_e4m3fn for name in plain)
    assert_same_bits(exported(bridge, model), plain)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False, strict=False)
    assert_same_bits(tensors_of(tmp_path / "out"), plain)
    saved, read = Glm5Config.from_hf(tmp_path / "out"), {"hf_raw": {}, "fp8": None}
    assert saved.fp8 is None
    assert saved.model_copy(update=read) == config.model_copy(update=read)


def test_streamed_weights_are_the_loaded_ones(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5.2", fp8=True)
    bridge, model = bridged(folder)
    tasks = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, model)
    parts = list(
        bridge._model_bridge.stream_weights_hf_to_megatron(bridge.hf_pretrained, model, tasks)
    )
    assert len(parts) == len(tasks)
    for part, task in zip(parts, tasks, strict=True):
        assert torch.equal(part.weight, task.param_weight), task.global_param_name


def test_task_mappings_go_both_ways(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5.2")
    bridge, model = bridged(folder)
    tensors = tensors_of(folder)
    for task in bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, model):
        whole = task.mapping.megatron_to_hf(task.param_weight, task.megatron_module)
        assert_same_bits(whole, {name: tensors[name] for name in whole})
        again = task.mapping.hf_to_megatron(whole, task.megatron_module)
        assert torch.equal(again, task.param_weight)


def test_mapping_refuses_float8_without_scale(tiny_folder: TinyFolder) -> None:
    bridge, model = bridged(tiny_folder("5"))
    task = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, model)[0]
    weight = task.param_weight.to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="float8 without its scale"):
        task.mapping.hf_to_megatron(weight, task.megatron_module)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"]
)
def test_missing_tensor_raises(tiny_folder: TinyFolder, tmp_path: Path, name: str) -> None:
    tensors = tensors_of(tiny_folder("5"))
    del tensors[name]
    folder = rewritten(tiny_folder("5"), tmp_path / "less", tensors)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        bridged(folder)


def test_extra_tensor_raises(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Layer 3 of the tiny 5.2 shares its keys: an indexer there is of another schedule."""
    extra = "model.layers.3.self_attn.indexer.wk.weight"
    tensors = tensors_of(tiny_folder("5.2")) | {extra: torch.ones(16, 64)}
    folder = rewritten(tiny_folder("5.2"), tmp_path / "more", tensors)
    with pytest.raises(CheckpointError, match=extra.replace(".", r"\.")):
        bridged(folder)


def test_export_over_another_checkpoint_raises(tiny_folder: TinyFolder) -> None:
    _, model = bridged(tiny_folder("5"))
    other = AutoBridge.from_hf_pretrained(str(tiny_folder("5.2")))
    with pytest.raises(CheckpointError, match="do not cover the tensors"):
        exported(other, model)


def test_model_and_checkpoint_of_other_sizes_raise(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Loading must not go by names alone."""
    folder = tmp_path / "narrow"
    shutil.copytree(tiny_folder("5"), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"moe_intermediate_size": 64}))
    with pytest.raises(CheckpointError, match="wrong shape"):
        bridged(folder)


def test_config_alone_makes_the_same_provider(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5.2")
    config = AutoConfig.from_pretrained(folder)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    expected = provider_of(folder)
    for name in ("indexer_types", "mlp_layer_types", "rope_theta", "qk_rope_head_dim"):
        assert getattr(provider.glm5, name) == getattr(expected.glm5, name), name


def test_a_revision_must_be_a_folder() -> None:
    opened = SimpleNamespace(model_name_or_path="some/model", init_kwargs={"revision": "abc"})
    with pytest.raises(ConfigError, match="revision"):
        read_config(opened)


def test_unfilled_and_fp8_exports_are_refused(tiny_folder: TinyFolder) -> None:
    bridge, model = bridged(tiny_folder("5"))
    with pytest.raises(ConfigError, match="unfilled"):
        bridge.load_hf_weights(model, allowed_mismatched_params=["*.bias"])
    bridge.export_weight_dtype = "fp8"
    with pytest.raises(ConfigError, match="export_weight_dtype"):
        list(bridge._model_bridge.build_export_fp8_tasks(bridge.hf_pretrained, model))
    with pytest.raises(ConfigError, match="export_hf_weights_quant"):
        bridge.export_hf_weights_quant(model, lambda name: True, lambda weight, block: (weight, 1))
