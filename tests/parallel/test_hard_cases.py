"""Gradients and selections that are easily wrong in a layout, each by its name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.runtime.distributed import Layout
from tests.parallel.assemble import assemble
from tests.parallel.bounds import LOSS_BOUND, SUMS
from tests.parallel.budget import budget_used
from tests.parallel.conftest import One, Ranks, bounds, results_of
from tests.parallel.exports import exported
from tests.parallel.jobs import (
    Job,
    differences_after_start,
    dropped_by_experts,
    gradients_when_recomputed,
    numbers,
    one_short_row,
    randomise_adapters,
    selecting_queries,
    selections_when_shared,
    start,
    weights_of_steps,
    write_adapter,
)
from tests.parallel.processes import run_ranks
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
    assert_all_close(got, chosen(expected), bounds(name).gradients)


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
def test_ranks_with_the_same_parameters_share_their_optimiser(
    one: One, ranks: Ranks, recipe: str
) -> None:
    """Each has half of the moments, but for the padding of parameters to multiples of 64."""
    whole = one(recipe)["moments"]
    assert whole == sum(gradient.numel() for gradient in one(recipe)["gradients"].values())
    halves = [rank["moments"] for rank in ranks("dp2", recipe)]
    assert sum(halves) == whole
    assert max(halves) - min(halves) <= 0.02 * whole


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("ep2", "adapters"), ("ep2", "indexer"), ("ep4", "adapters"), ("tp2cp2ep4", "adapters")],
)
def test_a_recipe_gives_the_same_numbers_at_any_ep(
    one: One, ranks: Ranks, name: str, recipe: str
) -> None:
    found = ranks(name, recipe)
    experts = [{n for n in rank["gradients"] if ".local_experts." in n} for rank in found]
    # each rank has its own experts, the step is the same
    assert all(experts) and sum(map(len, experts)) == len(set().union(*experts))
    assert set().union(*experts) == {n for n in one(recipe)["gradients"] if ".local_experts." in n}
    assert all(rank["steps"] == found[0]["steps"] for rank in found)
    expected = one(recipe)["weights"]
    assert_all_close(assemble(found, "weights", expected), expected, bounds(name).weights)


Recomputed = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session", params=["pp2", "pp2vpp2"])
def recomputed(job: MakeJob, request: pytest.FixtureRequest) -> Recomputed:
    """By recompute option: what each of two pipeline ranks finds in a step, 1F1B or interleaved."""
    return recompute(job(request.param, "weights"))


def recompute(job: Job) -> Recomputed:
    kinds = ("none", "full", "selective")
    jobs = [replace(job, recompute=kind) for kind in kinds]
    found = run_ranks(jobs[0].out_dir / "recomputed", 2, gradients_when_recomputed, jobs)
    return {kind: [rank[i] for rank in found] for i, kind in enumerate(kinds)}


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_with_micro_batches_in_flight_gives_the_same_bits(
    recomputed: Recomputed, recompute: str
) -> None:
    """Layers that share a selection find their own micro-batch's again."""
    for got, expected in zip(recomputed[recompute], recomputed["none"], strict=True):
        assert_all_close(got["gradients"], expected["gradients"], limit=0)
        # four micro-batches, each twice
        assert (got["calls"], expected["calls"]) == (8, 4)


def test_recompute_on_float8_weights_over_stages(job: MakeJob) -> None:
    found = recompute(job("pp2", "fp8"))
    for kind in ("full", "selective"):
        for got, expected in zip(found[kind], found["none"], strict=True):
            # the two gradients of a kv_b_proj may be added in any order
            assert_all_close(got["gradients"], expected["gradients"])
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
    assert_all_close({n: got[n] for n in expected}, expected, SUMS.gradients)
    # what no token reached stays zero
    assert not any(got[n].any() for n in alone["gradients"].keys() - expected.keys())
    for rank in found:
        assert rank["steps"][0]["loss"] == pytest.approx(alone["steps"][0]["loss"], rel=LOSS_BOUND)


@pytest.mark.parametrize("name", ["etp2", "tp2ep2etp2"])
@pytest.mark.parametrize("linear", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("factor", ["a", "b"])
def test_gradients_of_expert_adapters_under_expert_tensor_parallelism(
    one: One, ranks: Ranks, name: str, linear: str, factor: str
) -> None:
    """A of gate and up and B of down are whole: each rank sees a part of their gradient."""

    def chosen(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        end = f"pairs.{linear}.{factor}"
        return {n: g for n, g in gradients.items() if ".local_experts." in n and n.endswith(end)}

    expected = one("adapters")["gradients"]
    got = chosen(assemble(ranks(name, "adapters"), "gradients", expected))
    # eight experts in each of four layers
    assert len(got) == 32
    assert_all_close(got, chosen(expected), bounds(name).gradients)


@pytest.mark.parametrize("name", ["ep2", "ep4", "etp2", "tp2", "tp2cp2ep4", "tp2dp2ep2"])
def test_shared_factors_of_experts_have_the_gradient_of_all_tokens(
    one: One, ranks: Ranks, name: str
) -> None:
    """At any ep and any number of copies of the experts each token counts once, on all ranks."""
    expected = shared_factors(one("shared")["gradients"])
    # A of gate and up, B of down, in each of four layers
    assert len(expected) == 12 and all(gradient.any() for gradient in expected.values())
    for rank in ranks(name, "shared"):
        assert_all_close(shared_factors(rank["gradients"]), expected, bounds(name).gradients)


def test_shared_factors_stay_the_same_bits_on_all_ranks(job: MakeJob) -> None:
    """Two ranks of ep, each in two copies, under tensor parallelism."""
    alike = job("tp2dp2ep2", "shared")
    found = run_ranks(alike.out_dir / "steps", 4, weights_of_steps, alike, [1, 10])
    (first, last), *others = (tuple(map(shared_factors, weights)) for weights in found)
    for _, other in others:
        assert_all_close(other, last, limit=0)
    assert all(not torch.equal(first[name], last[name]) for name in last)


def test_ranks_with_the_same_tokens_drop_the_same_elements(job: MakeJob) -> None:
    """Parts of an expert must see one mask; other tokens, and other features, another one."""
    found = []
    for name in ("etp2", "dp2"):
        of_layout = job(name, "dropout")
        found += run_ranks(results_of(of_layout) / "dropped", 2, dropped_by_experts, of_layout)
    parts, other_parts, copies, other_copies = found
    assert torch.equal(parts["linear_fc1"], other_parts["linear_fc1"])
    assert not torch.equal(parts["linear_fc2"], other_parts["linear_fc2"])
    shortest = min(len(copies["linear_fc1"]), len(other_copies["linear_fc1"]))
    for name in copies:
        assert not torch.equal(copies[name][:shortest], other_copies[name][:shortest])
    for masks in (parts, other_parts, copies, other_copies):
        assert all(0.4 < float(mask.float().mean()) < 0.6 for mask in masks.values())


@pytest.mark.parametrize(("name", "recipe"), [("tp2pp2ep2", "shared"), ("tp2ep2etp2", "adapters")])
def test_an_adapter_starts_training_in_any_layout(
    job: MakeJob, tmp_path: Path, name: str, recipe: str
) -> None:
    """Each rank takes its part of every pair and of every whole parameter, bit for bit."""
    write_adapter(job("one", recipe), tmp_path / "adapter")
    start_there = job(name, recipe)
    for wrong in run_ranks(
        tmp_path / "ranks", 4, differences_after_start, start_there, tmp_path / "adapter"
    ):
        assert wrong == []


def shared_factors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of adapters that all experts of a layer share."""
    return {n: t for n, t in tensors.items() if ".experts.linear_fc" in n}


@pytest.mark.parametrize("name", ["tp2", "etp2", "tp2ep2etp2"])
@pytest.mark.parametrize("place", ["mlp.experts.", "mlp.shared_experts.", "layers.0.mlp."])
def test_gate_and_up_adapters_are_exported_in_order(
    job: MakeJob, one: One, ranks: Ranks, name: str, place: str
) -> None:
    """A rank holds its rows of gate above its rows of up; whole, gate is above up."""

    def rows(where: Job) -> dict[str, Tensor]:
        return {n: t for n, t in exported(where) if place in n and n.endswith("_proj.b")}

    one("adapters"), ranks(name, "adapters")
    got, expected = rows(job(name, "adapters")), rows(job("one", "adapters"))
    gates = [n for n in expected if "gate_proj" in n]
    assert gates
    assert_all_close(got, expected, bounds(name).weights)
    for gate in gates:
        up = expected[gate.replace("gate_proj", "up_proj")]
        halves = expected[gate].chunk(2)
        # neither up's rows nor another rank's would pass for gate's
        assert float((got[gate] - up).abs().max()) > 0.01
        assert float((got[gate] - torch.cat(halves[::-1])).abs().max()) > 0.01


def test_ranks_that_share_queries_select_what_ranks_that_share_heads_do(job: MakeJob) -> None:
    """Bit for bit; rank r of two has the queries r, r + 2, ... of every micro-batch."""
    jobs = [job("tp2", recipe) for recipe in ("heads", "mtp")]
    ranks = run_ranks(jobs[0].out_dir / "selected", 2, selections_when_shared, jobs)
    (all_rows, even), (same_rows, odd) = ranks
    assert torch.equal(all_rows, same_rows)
    assert len(even) == len(odd) == len(all_rows) // 2
    assert torch.equal(torch.stack([even, odd], dim=1).flatten(0, 1), all_rows)


# Three documents have at most the 8 tokens that a query selects; of the 21 and 14 queries of the
# others the first tensor-parallel rank has 10 and 7. A pad token makes the row even.
MIXED = (3, 21, 8, 1, 14)


def test_short_documents_of_a_mixed_row_attend_densely_by_heads(job: MakeJob) -> None:
    """Whole documents; the rest is attended for by tokens, by as many queries as there are."""
    alone = job("mixed", "adapters")
    split = replace(alone, layout=Layout(tp=2))
    expected = selecting_queries(alone, MIXED)
    found = run_ranks(results_of(alone), 2, selecting_queries, split, MIXED)
    # four micro-batches through four layers with an indexer
    assert expected["selected"] == [35] * 16
    assert {rank["tp_rank"]: rank["selected"] for rank in found} == {0: [17] * 16, 1: [18] * 16}
    gradients = assemble(found, "gradients", expected["gradients"])
    assert_all_close(gradients, expected["gradients"], SUMS.gradients)
    for rank in found:
        loss = rank["steps"][0]["loss"]
        assert loss == pytest.approx(expected["steps"][0]["loss"], rel=LOSS_BOUND)


def test_stages_of_one_rank_are_uneven_and_share_selections(ranks: Ranks) -> None:
    """Guards the interleaved cases: rank 0 has layer 0 and layers 2 to 5, of which 2 is full."""
    layers = [
        {int(n.split(".")[2]) for n in rank["gradients"] if n.startswith("decoder.layers.")}
        for rank in ranks("pp2vpp2", "adapters")
    ]
    assert layers == [{0, 2, 3, 4, 5}, {1, 6}]
    layers = [
        {int(n.split(".")[2]) for n in rank["gradients"] if n.startswith("decoder.layers.")}
        for rank in ranks("pp2", "mtp")
    ]
    assert layers == [{0, 1}, {2, 3, 4, 5, 6}]
    assert any(n.startswith("mtp.") for n in ranks("pp2vpp2", "mtp")[1]["gradients"])


@pytest.mark.parametrize("name", ["tp2ep2", "cp2", "pp2vpp2"])
@pytest.mark.parametrize("key", ["gradients", "weights"])
def test_a_layout_in_bf16_is_as_close_to_fp32_as_one_process(
    one: One, ranks: Ranks, name: str, key: str
) -> None:
    """The budget is one process's own error; where both round, neither is the reference.

    The model has no discrete decision (see `without_decisions`): a token that a rounding sends to
    another expert would change its gradients as a whole, in one process as in many.
    """
    peer, exact = one("bf16")[key], one("exact")[key]
    used = budget_used(assemble(ranks(name, "bf16"), key, peer), peer, exact)
    assert used <= 1
    # a budget that a factor of two would not break could not fail
    doubled = {n: 2 * t for n, t in peer.items()}
    assert budget_used(doubled, peer, exact) > 1
