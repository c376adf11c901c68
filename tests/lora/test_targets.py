"""Target names mean Hugging Face linears, and a setting that hits nothing is an error."""

from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules
from glm5.checkpoint.load import load_model
from glm5.errors import AdapterError
from glm5.lora.spec import LoraSpec, PairSpec
from glm5.lora.targets import (
    DEFAULT_TARGETS,
    HF_LINEARS,
    INDEXER_TARGETS,
    TargetModule,
    find_targets,
    hf_path,
)
from glm5.model.names import expert_name, is_stacked
from tests.tiny_models import TinyFolder

EVERY = tuple(name for names in HF_LINEARS.values() for name in names)


@pytest.fixture(scope="module")
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5.2"))


def find(model: GPTModel, *targets: str, **options: Any) -> list[TargetModule]:
    spec = LoraSpec(adapter_rank=2, adapter_alpha=4.0, targets=targets, **options)
    (found,) = find_targets([model], spec)
    return found


def test_the_names_are_those_of_the_conversion_rules(model: GPTModel) -> None:
    """Every decoder linear of the checkpoint, and its Hugging Face parts in the order of rows."""
    by_rules = {
        path: names
        for path, names in hf_modules(glm5_rules(model.config.glm5, include_mtp=False)).items()
        if path.startswith("decoder.layers.") and path.rpartition(".")[2] in HF_LINEARS
    }
    found = {}
    for target in find(model, *EVERY):
        experts = range(8) if is_stacked(target.path) else range(1)
        for path in (expert_name(target.path, expert) for expert in experts):
            found[path] = tuple(hf_path(path, name) for name in target.hf_linears)
    assert found == by_rules
    assert {path.rpartition(".")[2] for path in found} == set(HF_LINEARS)
    # every other matrix is no linear of a layer
    others = {name for name, p in model.named_parameters() if p.ndim > 1}
    others -= {f"{target.path}.weight" for target in find(model, *EVERY)}
    whole = ("router.weight", "word_embeddings.weight", "output_layer.weight")
    assert all(name.endswith(whole) for name in others)


def test_all_names_are_default_or_of_the_indexer() -> None:
    assert set(DEFAULT_TARGETS) | set(INDEXER_TARGETS) == set(EVERY)
    assert not set(DEFAULT_TARGETS) & set(INDEXER_TARGETS)
    assert len(DEFAULT_TARGETS) == 8


def test_half_of_a_stacked_linear_can_be_wanted(model: GPTModel) -> None:
    targets = find(model, "up_proj")
    assert all(target.hf_linears == ("gate_proj", "up_proj") for target in targets)
    assert {tuple(target.pairs) for target in targets} == {("up_proj",)}
    # 3 dense layers, and 4 sparse ones with all routed experts and the shared one
    assert len(targets) == 3 + 4 * 2


def test_routed_experts_can_be_left_out(model: GPTModel) -> None:
    targets = find(model, "up_proj", expert_lora="none")
    assert len(targets) == 3 + 4
    assert not any(is_stacked(target.path) for target in targets)


def test_indexer_targets_exist_on_full_layers_only(model: GPTModel) -> None:
    assert [target.path.split(".")[2] for target in find(model, "wk")] == ["0", "1", "2", "6"]


@pytest.mark.parametrize(
    "targets",
    [
        [],
        ["q_proj"],
        ["o_proj", "lm_head"],
        ["linear_proj"],
        ["gate"],
        ["o_proj", "o_proj"],
        ["O_PROJ"],
    ],
    ids=str,
)
def test_names_that_mean_nothing_are_refused(model: GPTModel, targets: list[str]) -> None:
    with pytest.raises(AdapterError, match="distinct linear names"):
        find(model, *targets)


def test_a_name_that_this_model_lacks_is_refused(model: GPTModel) -> None:
    with pytest.raises(AdapterError, match=r"(?s)lora.targets.*matches no linear.*'wk'"):
        find(model, "wk", "o_proj", exclude=r".*indexer\.wk")


def test_patterns_say_rank_and_scale_of_a_linear(model: GPTModel) -> None:
    """PEFT's rule: the first pattern that matches the path or an ending of it."""
    found = find(
        model,
        "o_proj",
        "down_proj",
        rank_pattern={"layers.1.self_attn.o_proj": 8, r"experts\.\d+\.down_proj": 1},
        alpha_pattern={"o_proj": 2.0, "shared_experts.down_proj": 6.0, "down_proj": 3.0},
    )
    pairs = {target.path: pair for target in found for pair in target.pairs.values()}
    assert pairs["decoder.layers.1.self_attention.linear_proj"] == PairSpec(8, 2.0 / 8)
    assert pairs["decoder.layers.2.self_attention.linear_proj"] == PairSpec(2, 2.0 / 2)
    assert pairs["decoder.layers.3.mlp.experts.linear_fc2"] == PairSpec(1, 3.0)
    assert pairs["decoder.layers.3.mlp.shared_experts.linear_fc2"] == PairSpec(2, 3.0)
    assert pairs["decoder.layers.0.mlp.linear_fc2"] == PairSpec(2, 1.5)
    (layer_1,) = {
        t.pairs["o_proj"]
        for t in find(model, "o_proj", rank_pattern={"o_proj": 9}, use_rslora=True)
    }
    assert layer_1 == PairSpec(9, 4.0 / 3)


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (("layers.0.self_attn.o_proj", "layers.6.self_attn.o_proj"), [1, 2, 3, 4, 5]),
        (("o_proj_not", "layers.0.self_attn.o_proj"), None),
        (r"model\.layers\.[0-4]\..*", [5, 6]),
        # a regular expression is for the whole path, an ending starts after a dot
        (r"layers\.[0-4]\..*", None),
        (("proj",), None),
    ],
    ids=str,
)
def test_excluded_linears(model: GPTModel, exclude: Any, left: list[int] | None) -> None:
    if left is None:
        with pytest.raises(AdapterError, match=r"lora.exclude: something matches no linear"):
            find(model, "o_proj", exclude=exclude)
        return
    found = [int(target.path.split(".")[2]) for target in find(model, "o_proj", exclude=exclude)]
    assert found == left


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank_pattern": {"experts.3.up_proj": 4}}, "experts of a layer different pairs"),
        ({"alpha_pattern": {r"experts\.[0-3]\.up_proj": 5.0}}, "experts of a layer different"),
        ({"exclude": ("experts.3.up_proj",)}, "leaves out some experts"),
        ({"rank_pattern": {"q_b_proj": 4}}, "lora.rank_pattern: something matches no linear"),
        ({"alpha_pattern": {"gate_proj": 4.0}}, "lora.alpha_pattern: something matches no"),
        ({"rank_pattern": {"(up": 4}}, "no regular expressions"),
        ({"exclude": "up)"}, "no regular expressions"),
        ({"rank_pattern": {"up_proj": 0}}, "out of range"),
        ({"dropout": 1.0}, "out of range"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(
    model: GPTModel, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(AdapterError, match=said):
        find(model, "up_proj", **options)


def test_dropout_on_absorbed_keys_and_values_is_refused(model: GPTModel) -> None:
    assert find(model, "o_proj", dropout=0.1)
    with pytest.raises(AdapterError, match=r"(?s)dropout.*kv_b_proj"):
        find(model, "o_proj", "kv_b_proj", dropout=0.1)


def test_experts_take_ranks_that_their_kernels_compute(model: GPTModel) -> None:
    find(model, "o_proj", "up_proj", rank_pattern={"o_proj": 600, r"shared_experts\..*": 200})
    with pytest.raises(AdapterError, match=r"(?s)routed experts.*129 for .*experts\.0\.up_proj"):
        find(model, "up_proj", rank_pattern={r"mlp\.experts\.\d+\.up_proj": 129})
