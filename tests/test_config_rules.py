"""The layer schedules: every spelling, their order, and their contradictions."""

import itertools
from typing import Any

import pytest

from glm5.config_rules import (
    expand_indexer_types,
    expand_mlp_layer_types,
    spell,
    types_from_frequency,
)
from glm5.errors import ConfigError

WORDS = {"F": "full", "S": "shared", "D": "dense"}


def words(letters: str) -> list[str]:
    return [WORDS[letter] for letter in letters]


def indexer(num_layers: int, **sources: Any) -> str:
    return spell(expand_indexer_types({"num_hidden_layers": num_layers} | sources))


def mlp(num_layers: int, **sources: Any) -> str:
    return spell(expand_mlp_layer_types({"num_hidden_layers": num_layers} | sources))


def test_no_source_is_all_full() -> None:
    assert indexer(5) == "FFFFF"


@pytest.mark.parametrize(
    ("sources", "schedule"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFSSSF"),
        ({"index_topk_freq": 4}, "FFSSSFSSSFS"),
        ({"index_topk_freq": 4, "index_topk_pattern": None, "indexer_types": None}, "FFSSSFSSSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFSFSFSF"),
        ({"index_skip_topk_offset": 3}, "FFFFFFFFFFF"),
        ({"index_topk_freq": 100, "index_skip_topk_offset": 1}, "FSSSSSSSSSS"),
    ],
)
def test_frequency(sources: dict[str, Any], schedule: str) -> None:
    assert indexer(11, **sources) == schedule


@pytest.mark.parametrize("num_layers", [1, 2, 7, 78])
def test_frequency_is_the_formula_of_transformers(num_layers: int) -> None:
    from transformers import GlmMoeDsaConfig

    for freq, offset in itertools.product([1, 2, 3, 4, 5, 78, 100], [0, 1, 2, 3, 4, 77, 78, 90]):
        theirs = GlmMoeDsaConfig(
            num_hidden_layers=num_layers, index_topk_freq=freq, index_skip_topk_offset=offset
        )
        ours = types_from_frequency(num_layers, freq, offset)
        assert list(ours) == theirs.indexer_types, (freq, offset)


@pytest.mark.parametrize("sources", [{}, {"index_topk_freq": 3}, {"index_skip_topk_offset": 1}])
def test_absent_frequency_keys_mean_what_they_mean_in_transformers(sources: dict[str, int]) -> None:
    from transformers import GlmMoeDsaConfig

    theirs = GlmMoeDsaConfig(num_hidden_layers=9, **sources)
    ours = expand_indexer_types({"num_hidden_layers": 9} | sources)
    assert list(ours) == theirs.indexer_types


@pytest.mark.parametrize("pattern", ["FSSF", ["full", "shared", "shared", "full"]])
def test_pattern_as_letters_and_as_words(pattern: Any) -> None:
    from transformers import GlmMoeDsaConfig

    assert indexer(4, index_topk_pattern=pattern) == "FSSF"
    theirs = GlmMoeDsaConfig(num_hidden_layers=4, index_topk_pattern=pattern)
    assert spell(theirs.indexer_types) == "FSSF"


@pytest.mark.parametrize(
    "sources",
    [
        {"indexer_types": words("FFSS")},
        {"indexer_types": words("FFSS"), "index_topk_pattern": "FFSS"},
        {"indexer_types": words("FFSS"), "index_topk_freq": 4, "index_skip_topk_offset": 2},
        # Without an offset, any offset may explain the list.
        {"indexer_types": words("FFSS"), "index_topk_freq": 4},
        {"index_topk_pattern": "FFSS", "index_topk_freq": 3},
        # An offset without a frequency is left behind by some transformers releases.
        {"indexer_types": words("FFSS"), "index_skip_topk_offset": 3},
    ],
)
def test_sources_that_agree(sources: dict[str, Any]) -> None:
    assert indexer(4, **sources) == "FFSS"


@pytest.mark.parametrize(
    ("sources", "what"),
    [
        (
            {"indexer_types": words("FFSS"), "index_topk_pattern": "FSSS"},
            "indexer_types contradicts index_topk_pattern",
        ),
        (
            {"indexer_types": words("FFSS"), "index_topk_freq": 4, "index_skip_topk_offset": 3},
            "contradict index_topk_freq",
        ),
        ({"indexer_types": words("FFSS"), "index_topk_freq": 1}, "contradict index_topk_freq"),
        ({"index_topk_pattern": "FSFS", "index_topk_freq": 3}, "contradict index_topk_freq"),
        ({"indexer_types": words("SFFF")}, "first layer is shared"),
        ({"index_topk_pattern": "SFFF"}, "first layer is shared"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "first layer is shared"),
        ({"indexer_types": words("FFF")}, "indexer_types has the wrong length"),
        ({"indexer_types": words("FFFFF")}, "indexer_types has the wrong length"),
        ({"indexer_types": []}, "indexer_types has the wrong length"),
        ({"index_topk_pattern": ""}, "index_topk_pattern has the wrong length"),
        ({"index_topk_pattern": "FFSSF"}, "index_topk_pattern has the wrong length"),
        ({"index_topk_pattern": "FFSX"}, "unknown layer kind in index_topk_pattern"),
        ({"index_topk_pattern": "ffss"}, "unknown layer kind in index_topk_pattern"),
        ({"indexer_types": ["full", "full", "full", None]}, "unknown layer kind in indexer_types"),
        ({"indexer_types": ["full", "full", "full", ["full"]]}, "unknown layer kind"),
        ({"indexer_types": "FFSS"}, "indexer_types is not valid"),
        ({"index_topk_pattern": 4}, "index_topk_pattern is not valid"),
        ({"index_topk_freq": 0}, "index_topk_freq is not valid"),
        ({"index_topk_freq": True}, "index_topk_freq is not valid"),
        ({"index_topk_freq": 4.0}, "index_topk_freq is not valid"),
        ({"index_skip_topk_offset": -1}, "index_skip_topk_offset is not valid"),
        ({"index_skip_topk_offset": "3"}, "index_skip_topk_offset is not valid"),
    ],
)
def test_schedules_refused(sources: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        indexer(4, **sources)
    assert caught.value.expected is not None


@pytest.mark.parametrize("first_k", [0, 1, 3, 4, 5, 100])
def test_first_k_dense_replace_as_in_transformers(first_k: int) -> None:
    from transformers import GlmMoeDsaConfig

    theirs = GlmMoeDsaConfig(num_hidden_layers=4, first_k_dense_replace=first_k)
    assert mlp(4, first_k_dense_replace=first_k) == spell(theirs.mlp_layer_types)


def test_mlp_default_is_three_dense_layers() -> None:
    assert mlp(5) == "DDDSS"
    assert mlp(2) == "DD"


def test_mlp_list_wins_over_the_default_that_transformers_writes() -> None:
    sparse = ["dense", "sparse", "sparse", "sparse"]
    assert mlp(4, mlp_layer_types=sparse) == "DSSS"
    assert mlp(4, mlp_layer_types=sparse, first_k_dense_replace=3) == "DSSS"
    assert mlp(4, mlp_layer_types=sparse, first_k_dense_replace=1) == "DSSS"


@pytest.mark.parametrize(
    ("sources", "what"),
    [
        (
            {"mlp_layer_types": ["dense"] * 2, "first_k_dense_replace": 1},
            "contradicts first_k_dense_replace",
        ),
        ({"mlp_layer_types": ["dense"]}, "wrong length"),
        ({"mlp_layer_types": ["dense"] * 3}, "wrong length"),
        ({"mlp_layer_types": ["dense", "moe"]}, "unknown layer kind"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is not valid"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace is not valid"),
    ],
)
def test_mlp_schedules_refused(sources: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        mlp(2, **sources)
