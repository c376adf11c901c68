"""Every layout replays what one process does: choices that no model would make by itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from glm5.runtime.distributed import Layout
from tests.parallel.assemble import assemble
from tests.parallel.bounds import bounds_of
from tests.parallel.conftest import results_of
from tests.parallel.jobs import Job
from tests.parallel.processes import run_ranks
from tests.parallel.replaying import replayed_steps
from tests.parallel.test_layouts import assert_same_steps
from tests.tiny_models import assert_all_close

MakeJob = Callable[..., Job]
Found = Callable[[str, str], list[dict[str, Any]]]

# name -> (processes, layout, recipes, recompute)
LAYOUTS: dict[str, tuple[int, Layout, tuple[str, ...], str]] = {
    "tp2": (2, Layout(tp=2), ("adapters", "indexer", "heads"), "none"),
    "cp2": (2, Layout(cp=2), ("adapters", "indexer"), "none"),
    "pp2": (2, Layout(pp=2), ("adapters", "indexer"), "full"),
    "pp2vpp2": (2, Layout(pp=2, vpp=2), ("adapters",), "selective"),
    "ep2": (2, Layout(ep=2), ("adapters", "indexer"), "none"),
    "tp2cp2ep4": (4, Layout(tp=2, cp=2, ep=4), ("adapters", "indexer"), "full"),
}
CASES = [(name, recipe) for name, (_, _, recipes, _) in LAYOUTS.items() for recipe in recipes]
ALONE = ("adapters", "indexer", "mtp")


@pytest.fixture(scope="module")
def found(job: MakeJob) -> Found:
    """found(layout or "one", recipe) -> what each rank found."""
    known: dict[str, list[list[dict[str, Any]]]] = {}

    def jobs(name: str, layout: Layout, recipes: tuple[str, ...], recompute: str) -> list[Job]:
        made = [job(f"replayed {name}", recipe) for recipe in recipes]
        return [replace(one, layout=layout, recompute=recompute) for one in made]

    def get(name: str, recipe: str) -> list[dict[str, Any]]:
        count, layout, recipes, recompute = LAYOUTS.get(name, (1, Layout(), ALONE, "none"))
        if name not in known:
            work = jobs(name, layout, recipes, recompute)
            known[name] = (
                [replayed_steps(work)]
                if count == 1
                else run_ranks(results_of(work[0]), count, replayed_steps, work)
            )
        return [rank[recipes.index(recipe)] for rank in known[name]]

    return get


def alone(found: Found, recipe: str) -> dict[str, Any]:
    (rank,) = found("one", "mtp" if recipe == "heads" else recipe)
    return rank


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_losses_and_every_gradient(found: Found, name: str, recipe: str) -> None:
    ranks, expected = found(name, recipe), alone(found, recipe)
    for rank in ranks:
        assert_same_steps(rank["steps"], expected["steps"])
    got = assemble(ranks, "gradients", expected["gradients"])
    assert_all_close(got, expected["gradients"], bounds_of(LAYOUTS[name][1]).gradients)


@pytest.mark.parametrize("name", LAYOUTS)
def test_overlaps_of_ranks_add_up(found: Found, name: str) -> None:
    """Each counts its own tokens and layers; ranks that share heads would all count the keys."""
    ranks, expected = found(name, "adapters"), alone(found, "adapters")["overlap"]
    for stream in ("experts", "topk"):
        recorded, same = sum(rank["overlap"][stream] for rank in ranks).tolist()
        assert recorded == expected[stream][0] > 0
        # rounding turns a near tie
        assert same == pytest.approx(int(expected[stream][1]), abs=2)


def test_the_drawn_choices_are_others(found: Found, one: Callable[[str], Any]) -> None:
    """Guards the tests above: a layout that ignored the replay would agree with `one`."""
    replayed = alone(found, "adapters")
    for stream in ("experts", "topk"):
        recorded, same = replayed["overlap"][stream].tolist()
        assert same < 0.9 * recorded
    assert replayed["steps"][0]["loss"] != pytest.approx(
        one("adapters")["steps"][0]["loss"], rel=1e-4
    )
    gradients, own = replayed["gradients"], one("adapters")["gradients"]
    assert not any(torch.equal(gradients[name], own[name]) for name in own)
    assert all(gradient.any() for gradient in gradients.values())
