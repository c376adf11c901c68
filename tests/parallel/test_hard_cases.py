"""Gradients and selections that are easily wrong in a layout, each by its name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.runtime.distributed import Layout
from tests.parallel.assemble import assemble
from tests.parallel.conftest import One, Ranks, results_of
from tests.parallel.jobs import (
    Job,
    gradients_when_recomputed,
    numbers,
    one_short_row,
    randomise_adapters,
    refusals,
    start,
)
from tests.parallel.processes import run_ranks
from tests.parallel.test_layouts import LOSS_BOUND, TENSOR_BOUND
from tests.tiny_models import assert_all_close

MakeJob = Callable[..., Job]


@pytest.mark.parametrize("name", ["tp2", "tp2ep2", "tp2pp2ep2", "tp2cp2ep4"])
@pytest.mark.parametrize(
    ("part", "factor"),
    [
        # B is cut, A is whole: a rank's A sees the gradient of its own heads only
        ("kv_b_proj", "a"),
        ("q_b_proj", "a"),
        # whole linears, but every rank sees its own tokens
        ("q_a_proj", "a"),
        ("q_a_proj", "b"),
        ("kv_a_proj_with_mqa", "a"),
        ("kv_a_proj_with_mqa", "b"),
        # A is cut, B is whole and adds to sums over ranks
        ("o_proj", "b"),
        ("shared_experts.linear_fc2.pairs.down_proj", "a"),
        ("shared_experts.linear_fc2.pairs.down_proj", "b"),
    ],
)
def test_gradients_of_adapters_under_tensor_and_sequence_parallelism(
    one: One, ranks: Ranks, name: str, part: str, factor: str
) -> None:
    def chosen(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: g for n, g in gradients.items() if n.endswith(f"{part}.{factor}")}

    expected = one("adapters")["gradients"]
    got = chosen(assemble(ranks(name, "adapters"), "gradients", expected))
    assert len(got) == (4 if "shared" in part else 7)
    assert all(gradient.any() for gradient in got.values())
    assert_all_close(got, chosen(expected), TENSOR_BOUND)


def test_the_down_projection_of_the_shared_expert_counts_once(
    job: MakeJob, one: One, ranks: Ranks
) -> None:
    def first_loss(factor: float) -> float:
        loop = start(job("doubled", "adapters"))
        only = "shared_experts.linear_fc2.down_proj"
        randomise_adapters(
            loop.state.chunks[0].module, lambda path: factor if path.endswith(only) else 1.0
        )
        return numbers(loop._step(1))["loss"]

    once, twice = first_loss(1.0), first_loss(2.0)
    assert once == one("adapters")["steps"][0]["loss"]
    # what two ranks would add up to, were it counted twice, is far outside the bound
    assert abs(twice - once) > 100 * LOSS_BOUND * once
    for rank in ranks("tp2", "adapters"):
        assert rank["steps"][0]["loss"] == pytest.approx(once, rel=LOSS_BOUND)


@pytest.mark.parametrize("recipe", ["adapters", "indexer"])
def test_a_recipe_gives_the_same_numbers_at_any_ep(one: One, ranks: Ranks, recipe: str) -> None:
    found = ranks("ep2", recipe)
    experts = [{n for n in rank["gradients"] if ".local_experts." in n} for rank in found]
    # each rank has its own experts, the step is the same
    assert experts[0] and not experts[0] & experts[1]
    assert experts[0] | experts[1] == {
        n for n in one(recipe)["gradients"] if ".local_experts." in n
    }
    assert found[0]["steps"] == found[1]["steps"]
    expected = one(recipe)["weights"]
    assert_all_close(assemble(found, "weights", expected), expected, TENSOR_BOUND)


@pytest.fixture(scope="session")
def recomputed(job: MakeJob) -> dict[str, list[dict[str, Any]]]:
    """By recompute option: what each stage of a pipeline of two finds in a 1F1B step."""
    kinds = ("none", "full", "selective")
    jobs = [replace(job("pp2", "weights"), recompute=kind) for kind in kinds]
    found = run_ranks(jobs[0].out_dir / "recomputed", 2, gradients_when_recomputed, jobs)
    return {kind: [rank[i] for rank in found] for i, kind in enumerate(kinds)}


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_with_micro_batches_in_flight_gives_the_same_bits(
    recomputed: dict[str, list[dict[str, Any]]], recompute: str
) -> None:
    """Layers that share a selection find their own micro-batch's again."""
    for got, expected in zip(recomputed[recompute], recomputed["none"], strict=True):
        assert_all_close(got["gradients"], expected["gradients"], limit=0)
        # four micro-batches, each twice
        assert (got["calls"], expected["calls"]) == (8, 4)


# One row of 14 tokens: a shard has 7, an indexer selects 8; the first document crosses the border.
SHORT = (11, 3)


@pytest.fixture(scope="session")
def short(job: MakeJob) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process and two context-parallel ranks find on short rows."""
    alone = job("short", "weights")
    split = replace(alone, layout=Layout(cp=2))
    return one_short_row(alone, SHORT), run_ranks(results_of(alone), 2, one_short_row, split, SHORT)


def test_queries_select_keys_of_another_context_rank(
    short: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    alone, found = short
    shards = [rank["selected"] for rank in sorted(found, key=lambda rank: rank["cp_rank"])]
    assert [shard.shape for shard in shards] == [(7, 8), (7, 8)]
    whole = torch.cat(shards)
    assert torch.equal(whole.sort(dim=1).values, alone["selected"].sort(dim=1).values)
    of_first_rank = (shards[1] >= 0) & (shards[1] < 7)
    # tokens 7 to 10 are of the first document, whose first 7 tokens the other rank holds
    assert of_first_rank[:4].any(dim=1).all() and not of_first_rank[4:].any()
    # the queries with more keys than they may select leave some out
    assert [int((row >= 0).sum()) for row in whole] == [*range(1, 9), 8, 8, 8, 1, 2, 3]


def test_a_selection_larger_than_a_shard_gives_the_same_step(
    short: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    alone, found = short
    expected = {n: g for n, g in alone["gradients"].items() if g.any()}
    got = assemble(found, "gradients", alone["gradients"])
    assert_all_close({n: got[n] for n in expected}, expected, TENSOR_BOUND)
    # what no token reached stays zero
    assert not any(got[n].any() for n in alone["gradients"].keys() - expected.keys())
    for rank in found:
        assert rank["steps"][0]["loss"] == pytest.approx(alone["steps"][0]["loss"], rel=LOSS_BOUND)


def test_layouts_that_do_not_divide_the_processes_are_refused_by_all(
    job: MakeJob,
) -> None:
    wrong = [Layout(tp=3), Layout(tp=4), Layout(pp=2, cp=2), Layout(ep=3), Layout(ep=2, pp=2)]
    for messages in run_ranks(results_of(job("refused", "weights")), 2, refusals, wrong):
        assert len(messages) == len(wrong)
        assert all("does not divide" in text and "2 process(es)" in text for text in messages)
