"""Every layout computes what one process does, and each goes on from what another one saved.

All in fp32; `tests/parallel/bounds.py` says by how much the numbers of each layout differ, and why.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.parallel.assemble import assemble
from tests.parallel.bounds import LOSS_BOUND, NORM_BOUND
from tests.parallel.conftest import CASES, SAME_ALONE, One, Ranks, bounds, results_of
from tests.parallel.exports import exported
from tests.parallel.jobs import LAST_STEP, Job, one_step_more, resumed_steps
from tests.parallel.processes import run_ranks
from tests.tiny_models import assert_all_close

every_case = pytest.mark.parametrize(("name", "recipe"), CASES)


def assert_same_steps(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, peer in zip(got, expected, strict=True):
        assert step["loss"] == pytest.approx(peer["loss"], rel=LOSS_BOUND)
        assert step["grad_norm"] == pytest.approx(peer["grad_norm"], rel=NORM_BOUND)
        assert step["trained_tokens"] == peer["trained_tokens"]
        assert step["lr"] == peer["lr"]


@every_case
def test_losses_and_gradient_norms(one: One, ranks: Ranks, name: str, recipe: str) -> None:
    for rank in ranks(name, recipe):
        assert_same_steps(rank["steps"], one(recipe)["steps"])
        assert rank["eval_loss"] == pytest.approx(one(recipe)["eval_loss"], rel=LOSS_BOUND)


@every_case
def test_every_gradient(one: One, ranks: Ranks, name: str, recipe: str) -> None:
    expected = one(recipe)["gradients"]
    got = assemble(ranks(name, recipe), "gradients", expected)
    assert_all_close(got, expected, bounds(name).gradients)


@every_case
def test_weights_after_three_steps(one: One, ranks: Ranks, name: str, recipe: str) -> None:
    expected = one(recipe)["weights"]
    got = assemble(ranks(name, recipe), "weights", expected)
    assert_all_close(got, expected, bounds(name).weights)


@every_case
def test_a_run_of_one_process_goes_on_in_the_layout(
    one: One, ranks: Ranks, name: str, recipe: str
) -> None:
    for rank in ranks(name, recipe):
        assert_same_steps(rank["resumed"], one(recipe)["later"])


@every_case
def test_a_run_of_the_layout_goes_on_in_one_process(
    job: Callable[..., Job], one: One, ranks: Ranks, name: str, recipe: str
) -> None:
    ranks(name, recipe)
    alone = replace(job("one", recipe), resume_from=job(name, recipe).out_dir)
    assert_same_steps(resumed_steps(alone), one(recipe)["later"])


@pytest.mark.parametrize(
    ("two_ranks", "four_ranks", "recipe"),
    [("tp2", "tp2pp2ep2", "adapters"), ("pp2", "tp2cp2", "mtp")],
)
def test_a_run_goes_on_from_two_processes_over_four_to_one(
    job: Callable[..., Job],
    one: One,
    ranks: Ranks,
    two_ranks: str,
    four_ranks: str,
    recipe: str,
) -> None:
    """Weights, moments, rate and rows: each process count finds what the one before it left."""
    ranks(two_ranks, recipe)
    four = replace(job(four_ranks, recipe), out_dir=job("chain", recipe).out_dir)
    four = replace(four, resume_from=job(two_ranks, recipe).out_dir)
    fourth = run_ranks(results_of(four), 4, one_step_more, four, LAST_STEP)
    alone = replace(job("chain end", recipe), resume_from=four.out_dir)
    fifth = one_step_more(alone, LAST_STEP + 1)
    for rank in fourth:
        assert_same_steps([rank, fifth], one(recipe)["later"])
    # the rate tells the steps apart
    assert fourth[0]["lr"] != fifth["lr"]


@every_case
def test_one_process_exports_what_the_layout_saved(
    job: Callable[..., Job], one: One, ranks: Ranks, name: str, recipe: str
) -> None:
    ranks(name, recipe), one(recipe)
    expected = dict(exported(job("one", SAME_ALONE.get(recipe, recipe))))
    assert_all_close(dict(exported(job(name, recipe))), expected, bounds(name).weights)


def test_the_comparisons_can_fail(one: One, ranks: Ranks) -> None:
    """Controls: other rows, a gradient summed twice, halves in another order."""
    alone = one("adapters")
    first, second, *_ = alone["steps"]
    with pytest.raises(AssertionError):
        assert_same_steps([second], [first])
    found: list[dict[str, Any]] = ranks("tp2", "adapters")
    expected, limit = alone["gradients"], bounds("tp2").gradients
    got = assemble(found, "gradients", expected)
    for name in got:
        if got[name].any():
            with pytest.raises(AssertionError, match="error"):
                assert_all_close(got | {name: 2 * got[name]}, expected, limit)
    swapped = [rank | {"tp_rank": 1 - rank["tp_rank"]} for rank in found]
    with pytest.raises(AssertionError, match="error"):
        assert_all_close(assemble(swapped, "gradients", expected), expected, limit)


def test_steps_move_weights_and_reach_every_tensor(one: One) -> None:
    """Guards the tests above: what does not change is equal in every layout."""
    for recipe in ("adapters", "shared", "indexer"):
        found = one(recipe)
        assert all(gradient.any() for gradient in found["gradients"].values())
        assert found["steps"][0]["loss"] - found["steps"][-1]["loss"] > 1e-3
    beside = {name for name in one("shared")["gradients"] if ".pairs." not in name}
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} < beside
    assert {f"decoder.layers.3.{n}.weight" for n in ("input_layernorm", "mlp.router")} < beside
    indexers = {name for name in one("weights")["gradients"] if ".indexer." in name}
    assert {n for n, g in one("weights")["gradients"].items() if not g.any()} == indexers
