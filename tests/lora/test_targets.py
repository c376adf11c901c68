"""Target names mean Hugging Face linears, and a name that hits nothing is an error."""

import pytest
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules
from glm5.checkpoint.load import load_model
from glm5.errors import AdapterError
from glm5.lora.targets import DEFAULT_TARGETS, HF_LINEARS, INDEXER_TARGETS, find_targets
from tests.tiny_models import TinyFolder


@pytest.fixture(scope="module")
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5.2"))


def test_the_names_are_those_of_the_conversion_rules(model: GPTModel) -> None:
    """Every decoder linear of the checkpoint, and its Hugging Face parts in the order of rows."""
    by_rules = {
        path: tuple(name.rpartition(".")[2] for name in names)
        for path, names in hf_modules(glm5_rules(model.config.glm5, include_mtp=False)).items()
        if path.startswith("decoder.layers.")
    }
    linears = {
        path: names
        for path, names in by_rules.items()
        if model.get_submodule(path).weight.dim() == 2 and not path.endswith(".router")
    }
    every = [name for names in HF_LINEARS.values() for name in names]
    found = {target.path: target.hf_linears for target in find_targets(model, every)}
    assert found == linears
    assert {path.rpartition(".")[2] for path in found} == set(HF_LINEARS)


def test_all_names_are_default_or_of_the_indexer() -> None:
    every = {name for names in HF_LINEARS.values() for name in names}
    assert set(DEFAULT_TARGETS) | set(INDEXER_TARGETS) == every
    assert not set(DEFAULT_TARGETS) & set(INDEXER_TARGETS)
    assert len(DEFAULT_TARGETS) == 8


def test_half_of_a_stacked_linear_can_be_wanted(model: GPTModel) -> None:
    targets = find_targets(model, ["up_proj"])
    assert all(target.hf_linears == ("gate_proj", "up_proj") for target in targets)
    assert {target.wanted for target in targets} == {("up_proj",)}
    # 3 dense layers, and 4 sparse ones with 8 routed experts and the shared one
    assert len(targets) == 3 + 4 * 9


def test_indexer_targets_exist_on_full_layers_only(model: GPTModel) -> None:
    layers = [target.path.split(".")[2] for target in find_targets(model, ["wk"])]
    assert layers == ["0", "1", "2", "6"]


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
        find_targets(model, targets)


def test_a_name_that_this_model_lacks_is_refused(model: GPTModel) -> None:
    dense_only = model.decoder.layers[3].self_attention
    with pytest.raises(AdapterError, match=r"(?s)match no module.*'wk'"):
        find_targets(dense_only, ["wk"])
