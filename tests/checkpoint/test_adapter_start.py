"""Training that starts from an adapter folder: the model computes what the folder's writer did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraAdapter, write_peft_adapter
from glm5.checkpoint.adapter_serving import write_serving_adapter
from glm5.checkpoint.adapter_start import check_adapter_folder, start_from_adapter
from glm5.checkpoint.ckpt_dir import LoraRecord
from glm5.checkpoint.load import load_model
from glm5.checkpoint.trained import adapt
from glm5.errors import AdapterError
from glm5.export.factors import trained_adapter
from glm5.lora.attach import is_adapter
from glm5.model.forward import logits
from tests.tiny_models import TinyFolder, draw_tokens

RECORD: dict[str, Any] = {
    "rank": 3,
    "alpha": 6.0,
    "targets": ["q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
LAYOUTS = ("per_expert", "shared_outer")


def adapted(folder: Any, **changes: Any) -> GPTModel:
    model = load_model(folder)
    adapt([model], LoraRecord(**{**RECORD, **changes}), seed=0)
    return model


def disturb(model: GPTModel) -> None:
    """Gives everything that trains other values."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def computed(model: GPTModel) -> Tensor:
    return logits(model.eval(), draw_tokens(24))


def saved(model: GPTModel, folder: Path) -> LoraAdapter:
    adapter = trained_adapter(model, torch.float32)
    write_peft_adapter(folder, adapter, config=model.config.glm5, base_name="base")
    return adapter


@pytest.mark.parametrize("expert_lora", LAYOUTS)
def test_an_engines_folder_gives_every_factor_back(
    tiny_folder: TinyFolder, tmp_path: Path, expert_lora: str
) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder, expert_lora=expert_lora)
    disturb(model)
    adapter = trained_adapter(model, torch.float32)
    write_serving_adapter(
        tmp_path / "a", adapter, engine="sglang", config=model.config.glm5, base_name="base"
    )
    other = adapted(folder, expert_lora=expert_lora)
    assert not torch.equal(computed(other), computed(model))
    start_from_adapter([other], tmp_path / "a")
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert any(is_adapter(name) and parameter.any() for name, parameter in other.named_parameters())


def test_whole_parameters_come_from_modules_to_save(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder, train=["router", "norms", "embeddings", "lm_head"])
    disturb(model)
    saved(model, tmp_path / "a")
    other = adapted(folder, train=["router", "norms", "embeddings", "lm_head"])
    start_from_adapter([other], tmp_path / "a")
    torch.testing.assert_close(computed(other), computed(model), rtol=0, atol=0)


def test_ranks_by_pattern_and_another_scale_keep_the_delta(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder("5.2")
    patterns = {"rank_pattern": {"o_proj": 5}}
    model = adapted(folder, **patterns)
    disturb(model)
    saved(model, tmp_path / "a")
    other = adapted(folder, **patterns, alpha=3.7, use_rslora=True)
    start_from_adapter([other], tmp_path / "a")
    torch.testing.assert_close(computed(other), computed(model), rtol=1e-4, atol=1e-4)


def test_zeros_behind_a_rank_are_cut_off(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """An engine has one rank for all linears."""
    folder = tiny_folder("5.2")
    patterns = {"rank_pattern": {"o_proj": 5}}
    model = adapted(folder, **patterns)
    disturb(model)
    adapter = trained_adapter(model, torch.float32)
    write_serving_adapter(
        tmp_path / "a", adapter, engine="sglang", config=model.config.glm5, base_name="base"
    )
    other = adapted(folder, **patterns)
    start_from_adapter([other], tmp_path / "a")
    torch.testing.assert_close(computed(other), computed(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert_lora", LAYOUTS)
def test_a_peft_folder_of_shared_factors_fits_both_layouts(
    tiny_folder: TinyFolder, tmp_path: Path, expert_lora: str
) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder, expert_lora="shared_outer")
    disturb(model)
    saved(model, tmp_path / "a")
    other = adapted(folder, expert_lora=expert_lora)
    start_from_adapter([other], tmp_path / "a")
    torch.testing.assert_close(computed(other), computed(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["o_proj"]}, "train nowhere in this model"),
        ({"targets": [*RECORD["targets"], "q_a_proj"]}, "the folder has no pair for"),
        ({"rank": 2}, "has rank 3 in the folder and 2"),
        ({"rank": 4}, "has rank 3 in the folder and 4"),
        ({"expert_lora": "shared_outer"}, "factors of their own"),
        ({"train": ["router"]}, "the folder lacks"),
        ({"expert_lora": "none"}, "train nowhere in this model"),
    ],
)
def test_another_adapter_than_the_runs_is_refused(
    tiny_folder: TinyFolder, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder)
    disturb(model)
    saved(model, tmp_path / "a")
    with pytest.raises(AdapterError, match=message):
        start_from_adapter([adapted(folder, **changes)], tmp_path / "a")


def test_a_router_of_another_base_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder, train=["router"])
    disturb(model)
    buffers = dict(model.named_buffers())
    (bias, *_) = (b for name, b in buffers.items() if name.endswith("expert_bias"))
    bias.add_(1)
    saved(model, tmp_path / "a")
    with pytest.raises(AdapterError, match="differ from the base's"):
        start_from_adapter([adapted(folder, train=["router"])], tmp_path / "a")


def test_b_is_rounded_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder, targets=["o_proj"])
    disturb(model)
    saved(model, tmp_path / "a")
    other = load_model(folder, dtype="bfloat16")
    adapt([other], LoraRecord(**{**RECORD, "targets": ["o_proj"], "alpha": 3.7}), seed=0)
    start_from_adapter([other], tmp_path / "a")
    meant = dict(model.named_parameters())
    found = {n: p for n, p in other.named_parameters() if n.endswith("pairs.o_proj.b")}
    assert len(found) == other.config.num_layers
    for name, got in found.items():
        assert torch.equal(got, (meant[name].double() * ((6.0 / 3) / (3.7 / 3))).bfloat16())


def test_values_that_are_no_numbers_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5.2")
    model = adapted(folder, targets=["o_proj"])
    disturb(model)
    saved(model, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="NaN or infinity"):
        start_from_adapter([adapted(folder, targets=["o_proj"])], tmp_path / "a")


def test_what_is_no_adapter_folder_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        check_adapter_folder(tmp_path)
    (tmp_path / "glm5.json").write_text("{}")
    with pytest.raises(AdapterError, match="is a checkpoint of glm5"):
        check_adapter_folder(tmp_path)
