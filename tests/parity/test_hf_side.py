"""The reference side refuses what cannot be an oracle, and observes `transformers` as it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config import Glm5Config
from glm5.errors import CheckpointError, ConfigError
from glm5.parity.hf_side import load_reference, observe_hf
from tests.tiny_models import TinyFolder, assert_close, draw_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("version", ["4.57.1", "5.2.0", "5.12.9"])
def test_an_old_transformers_is_no_oracle(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    folder = tiny_folder("5")
    with pytest.raises(ConfigError, match=rf"(?s)got: +{version}.*5\.13.*upgrade transformers"):
        load_reference(folder, Glm5Config.from_hf(folder), CPU)


@pytest.mark.parametrize("version", ["5.13.0", "5.14.0.dev0", "6.0.0"])
def test_a_newer_transformers_is_one(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    folder = tiny_folder("5")
    load_reference(folder, Glm5Config.from_hf(folder), CPU)


def changed(folder: Path, target: Path, **changes: Any) -> tuple[Path, Glm5Config]:
    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | changes))
    return target, Glm5Config.from_hf(target)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"use_cache": "yes"}, "transformers refuses this config.json"),
    ],
)
def test_what_transformers_cannot_express_is_named(
    tiny_folder: TinyFolder, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder, glm5 = changed(tiny_folder("5"), tmp_path / "changed", **changes)
    with pytest.raises(ConfigError, match=named):
        load_reference(folder, glm5, CPU)


def test_what_transformers_cannot_load_is_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, glm5 = changed(tiny_folder("5"), tmp_path / "changed")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"transformers cannot load {folder}"):
        load_reference(folder, glm5, CPU)


def test_the_reference_follows_the_latent_eps_and_the_schedule(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5.2")
    glm5 = Glm5Config.from_hf(folder).model_copy(update={"latent_norm_eps": 0.5})
    model = load_reference(folder, glm5, CPU)
    assert not model.training
    for layer, kind in zip(model.model.layers, glm5.indexer_types, strict=True):
        assert layer.self_attn.q_a_layernorm.variance_epsilon == 0.5
        assert layer.self_attn.kv_a_layernorm.variance_epsilon == 0.5
        assert (layer.self_attn.indexer is not None) == (kind == "full")
        assert layer.input_layernorm.variance_epsilon == glm5.rms_norm_eps


def test_an_observation_equals_a_plain_run_and_leaves_no_hook(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5")
    model = load_reference(folder, Glm5Config.from_hf(folder), CPU)
    token_ids = draw_tokens(20)
    seen = observe_hf(model, token_ids, [13, 7])
    with torch.no_grad():
        plain = [model(part[None]).logits[0] for part in token_ids.split([13, 7])]
    assert_close(seen.logits, torch.cat(plain))
    assert not any(module._forward_hooks for module in model.modules())
    # the second document's keys are counted in packed positions
    assert seen.selected[0][13:].amax() == 19
    assert seen.selected[0].shape == (20, 8)
    assert set(seen.hidden) == set(seen.scores) == {0, 1, 2}


def test_a_selection_can_be_imposed(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5")
    model = load_reference(folder, Glm5Config.from_hf(folder), CPU)
    token_ids = draw_tokens(20)
    own = observe_hf(model, token_ids, [20], gradients=False)
    same = observe_hf(model, token_ids, [20], selected=own.selected, gradients=False)
    assert_close(same.logits, own.logits)
    first_keys = torch.arange(8, dtype=torch.int32).expand(20, 8).clone()
    first_keys[first_keys > torch.arange(20)[:, None]] = -1
    imposed = dict.fromkeys(own.selected, first_keys)
    other = observe_hf(model, token_ids, [20], selected=imposed, gradients=False)
    assert (other.logits[:8] - own.logits[:8]).abs().max() < 1e-5
    assert (other.logits[8:] - own.logits[8:]).abs().max() > 1e-2
