"""HF -> Megatron -> HF is bitwise, in every dtype, and a rule that is wrong is seen."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.convert import hf_weights, load_hf_weights, mcore_tensors
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.load import build_for, load_model
from glm5.checkpoint.rules import GatedPair, Rename, Rule
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from tests.tiny_models import TinyFolder

# The families that differ: 5.1 is 5 with other weights.
FOLDERS: list[tuple[str, dict[str, Any]]] = [
    ("5", {"dtype": "float32"}),
    ("5.2", {"dtype": "float32"}),
    ("5.2", {"dtype": "bfloat16"}),
    ("5.2", {"dtype": "bfloat16", "fp8": True}),
]


def read_all(folder: Path) -> dict[str, Tensor]:
    with open_checkpoint(folder, Glm5Config.from_hf(folder)) as reader:
        return {name: reader.read(name) for name in reader.names()}


def round_trip(folder: Path, write_rules: Callable[[list[Rule]], list[Rule]]) -> dict[str, Tensor]:
    """Loads with the family's rules and writes with those that `write_rules` makes of them."""
    model = load_model(folder, include_mtp=True)
    rules = glm5_rules(model.config.glm5, include_mtp=True)
    return dict(hf_weights(mcore_tensors(model), write_rules(rules)))


def wrong(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose tensors differ in shape, dtype or any bit."""
    assert got.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if got[name].dtype != tensor.dtype or not torch.equal(got[name], tensor)
    ]


@pytest.mark.parametrize(("variant", "options"), FOLDERS)
def test_there_and_back_is_bitwise(
    tiny_folder: TinyFolder, variant: str, options: dict[str, Any]
) -> None:
    folder = tiny_folder(variant, **options)
    expected = read_all(folder)
    assert any(name.endswith("eh_proj.weight") for name in expected)
    assert wrong(round_trip(folder, lambda rules: rules), expected) == []


def swap_gate_and_up(rules: list[Rule]) -> list[Rule]:
    """One pair is halved the wrong way round."""
    index = next(i for i, rule in enumerate(rules) if isinstance(rule, GatedPair))
    rule = rules[index]
    swapped = dataclasses.replace(rule, hf_gate=rule.hf_up, hf_up=rule.hf_gate)
    return [*rules[:index], swapped, *rules[index + 1 :]]


def swap_two_layers(rules: list[Rule]) -> list[Rule]:
    """Two norms of one shape trade places."""
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    other = {first: second, second: first}
    return [
        dataclasses.replace(rule, hf=other.get(rule.hf, rule.hf))
        if isinstance(rule, Rename)
        else rule
        for rule in rules
    ]


@pytest.mark.parametrize("spoil", [swap_gate_and_up, swap_two_layers])
def test_a_wrong_rule_is_seen(
    tiny_folder: TinyFolder, spoil: Callable[[list[Rule]], list[Rule]]
) -> None:
    folder = tiny_folder("5", dtype="float32")
    assert len(wrong(round_trip(folder, spoil), read_all(folder))) == 2


def test_every_source_and_target_is_used_once(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5")
    config = Glm5Config.from_hf(folder)
    rules = glm5_rules(config, include_mtp=True)
    (model,) = build_for(config, include_mtp=True)
    with open_checkpoint(folder, config) as reader:
        with pytest.raises(CheckpointError, match=r"sources that no rule covers.*lm_head.weight"):
            fewer = [r for r in rules if "lm_head.weight" not in r.hf_names]
            load_hf_weights([model], reader, fewer)
        with pytest.raises(CheckpointError, match=r"targets in two rules"):
            load_hf_weights([model], reader, [*rules, rules[0]])
    with pytest.raises(CheckpointError, match=r"targets that are missing.*output_layer.weight"):
        tensors = mcore_tensors(model)
        del tensors["output_layer.weight"]
        list(hf_weights(tensors, rules))


def test_adapters_are_no_part_of_the_checkpoint(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"), include_mtp=True)
    before = set(mcore_tensors(model))
    spec = LoraSpec(adapter_rank=2, adapter_alpha=2.0, targets=("o_proj", "gate_proj"))
    attach_lora(model, spec, seed=0)
    assert set(mcore_tensors(model)) == before


def test_progress_adds_up_to_the_model(tiny_folder: TinyFolder) -> None:
    heard: list[tuple[int, int]] = []
    model = load_model(
        tiny_folder("5"), include_mtp=True, progress=lambda *told: heard.append(told)
    )
    total = sum(tensor.nbytes for tensor in mcore_tensors(model).values())
    assert {told for _, told in heard} == {total}
    done = [count for count, _ in heard]
    assert done == sorted(set(done)) and done[-1] == total


def test_progress_of_float8_weights_counts_values_and_scales(fp8_folder: TinyFolder) -> None:
    heard: list[tuple[int, int]] = []
    model = load_model(
        fp8_folder("5"), base_weights="fp8", progress=lambda *told: heard.append(told)
    )
    held = [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("scale_inv"))]
    biases = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("expert_bias"))
    total = sum(tensor.nbytes for tensor in held) + biases
    assert heard[-1] == (total, total)
