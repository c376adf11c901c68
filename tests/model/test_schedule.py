"""Stages start on layers that select keys of their own; other splits are refused by name."""

import json
from itertools import accumulate, combinations
from pathlib import Path

import pytest

from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.errors import LayoutError
from glm5.model.schedule import check_stages, nearest_split, pipeline_layout, stage_starts

CONFIGS = Path(__file__).parents[2] / "src/glm5/configs"


def tiny() -> Glm5Config:
    """Layers 0, 1, 2 and 6 of 7 are full."""
    return Glm5Config.from_hf_dict(tiny_config("5.2"))


def published(name: str) -> Glm5Config:
    return Glm5Config.from_hf_dict(json.loads((CONFIGS / name).read_text()))


@pytest.mark.parametrize(
    ("split", "stage", "layer", "source", "nearest"),
    [
        ([3, 4], 1, 3, 2, [2, 5]),
        ([5, 2], 1, 5, 2, [6, 1]),
        ([1, 1, 2, 3], 3, 4, 2, [1, 1, 4, 1]),
        ([4, 2, 1], 1, 4, 2, [2, 4, 1]),
    ],
)
def test_a_stage_that_starts_on_a_shared_layer_is_named(
    split: list[int], stage: int, layer: int, source: int, nearest: list[int]
) -> None:
    with pytest.raises(LayoutError) as caught:
        check_stages(tiny(), split)
    text = str(caught.value)
    assert f"stage {stage} starts on layer {layer}," in text
    assert f"layer {source} selects" in text
    assert f"use layers per stage {nearest}" in text
    check_stages(tiny(), nearest)


@pytest.mark.parametrize("split", [[7], [1, 6], [2, 5], [6, 1], [1, 1, 5], [1, 1, 4, 1]])
def test_stages_that_start_on_full_layers_are_taken(split: list[int]) -> None:
    check_stages(tiny(), split)


@pytest.mark.parametrize(
    ("stages", "split"), [(1, [7]), (2, [2, 5]), (3, [2, 4, 1]), (4, [1, 1, 4, 1])]
)
def test_nearest_split_of_the_tiny_model(stages: int, split: list[int]) -> None:
    assert nearest_split(tiny(), stages) == split


def test_more_stages_than_full_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"(?s)too many.*got: +5.*at most 4"):
        nearest_split(tiny(), 5)


@pytest.mark.parametrize("stages", [1, 2, 4, 6, 8, 13, 20])
def test_every_stage_of_the_published_5_2_starts_on_a_full_layer(stages: int) -> None:
    glm5 = published("glm52.json")
    split = nearest_split(glm5, stages)
    assert len(split) == stages and sum(split) == 78
    assert all(glm5.indexer_types[start] == "full" for start in stage_starts(split))


@pytest.mark.parametrize("split", [[18, 20, 20, 20], [14, 8, 8, 8, 8, 8, 8, 16]])
def test_splits_in_use_for_the_published_5_2_are_valid(split: list[int]) -> None:
    check_stages(published("glm52.json"), split)
    layout = pipeline_layout(published("glm52.json"), len(split), split, mtp=True)
    assert [stage.count("decoder") for stage in layout] == split


def test_the_nearest_valid_split_keeps_what_was_right() -> None:
    """Of [10, 24, 22, 22] layers 0, 10 and 34 may start a stage; 56 becomes 54 or 58."""
    with pytest.raises(LayoutError, match=r"use layers per stage \[10, 24, 20, 24\]"):
        check_stages(published("glm52.json"), [10, 24, 22, 22])


@pytest.mark.parametrize("stages", [4, 8])
def test_the_even_split_of_the_published_5_2_is_not_valid(stages: int) -> None:
    even = [78 // stages + (stage < 78 % stages) for stage in range(stages)]
    with pytest.raises(LayoutError, match=r"stage \d starts on layer"):
        check_stages(published("glm52.json"), even)


@pytest.mark.parametrize("stages", [4, 8])
def test_no_split_of_the_published_5_2_has_a_smaller_largest_stage(stages: int) -> None:
    glm5 = published("glm52.json")
    assert max(nearest_split(glm5, stages)) == smallest_largest_stage(glm5, stages)


def smallest_largest_stage(glm5: Glm5Config, stages: int) -> int:
    full = [i for i, kind in enumerate(glm5.indexer_types) if kind == "full" and i]
    total = glm5.num_hidden_layers
    return min(
        max(after - start for start, after in zip((0, *inner), (*inner, total), strict=True))
        for inner in combinations(full, stages - 1)
    )


def test_a_model_whose_layers_are_all_full_splits_evenly() -> None:
    glm5 = published("glm5.json")
    assert nearest_split(glm5, 6) == [13] * 6
    check_stages(glm5, [1] * 78)


def test_embedding_mtp_and_loss_stand_at_the_ends() -> None:
    assert pipeline_layout(tiny(), 2, None, mtp=True) == [
        ["embedding", *["decoder"] * 2],
        [*["decoder"] * 5, "mtp", "loss"],
    ]
    assert pipeline_layout(tiny(), 2, [6, 1], mtp=False)[1] == ["decoder", "loss"]
    assert pipeline_layout(tiny(), 1, None, mtp=False) == [["embedding", *["decoder"] * 7, "loss"]]


def test_stage_starts_are_the_sums_before() -> None:
    split = [1, 1, 4, 1]
    assert stage_starts(split) == [0, *accumulate(split)][:-1]
