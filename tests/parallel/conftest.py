"""One process's results, and those of layouts, each computed once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5.runtime.distributed import Layout
from tests.parallel.bounds import Bounds, bounds_of
from tests.parallel.jobs import (
    Job,
    observe,
    resumed_steps,
    train_and_resume,
    without_decisions,
)
from tests.parallel.processes import run_ranks
from tests.tiny_models import TinyFolder, fp8_folder, tiny_folder

__all__ = ["fp8_folder", "tiny_folder"]

# name -> (processes, layout, recipes)
LAYOUTS: dict[str, tuple[int, Layout, tuple[str, ...]]] = {
    "dp2": (2, Layout(), ("adapters", "indexer")),
    "ep2": (2, Layout(ep=2), ("adapters", "shared", "indexer", "fp8")),
    "etp2": (2, Layout(etp=2), ("adapters", "shared", "weights", "fp8")),
    "tp2": (2, Layout(tp=2), ("adapters", "shared", "heads", "mtp", "fp8")),
    "cp2": (2, Layout(cp=2), ("adapters", "indexer", "mtp", "bf16", "fp8")),
    "pp2": (2, Layout(pp=2), ("adapters", "mtp", "fp8")),
    "pp2vpp2": (2, Layout(pp=2, vpp=2), ("adapters", "mtp", "bf16", "fp8")),
    "tp2ep2": (2, Layout(tp=2, ep=2), ("adapters", "bf16", "fp8")),
    "tp2pp2ep2": (4, Layout(tp=2, pp=2, ep=2), ("adapters", "shared")),
    "tp2ep2etp2": (4, Layout(tp=2, ep=2, etp=2), ("adapters",)),
    "tp2cp2ep4": (4, Layout(tp=2, cp=2, ep=4), ("adapters", "shared")),
    "tp2dp2ep2": (4, Layout(tp=2, ep=2), ("shared",)),
    "ep4": (4, Layout(ep=4), ("adapters", "shared")),
    "tp2cp2": (4, Layout(tp=2, cp=2), ("mtp",)),
}
CASES = [
    (name, recipe)
    for name, (_, _, recipes) in LAYOUTS.items()
    for recipe in recipes
    if recipe != "bf16"
]
# In one process there is nothing to share.
SAME_ALONE = {"heads": "mtp"}


def bounds(name: str) -> Bounds:
    """How far a layout may be from one process."""
    return bounds_of(LAYOUTS[name][1])


One = Callable[[str], dict[str, Any]]
Ranks = Callable[[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def job(
    tiny_folder: TinyFolder, fp8_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Job]:
    """job(name, recipe) -> that recipe on the tiny 5.2, writing to a folder of its own."""
    folder = tmp_path_factory.mktemp("layouts")
    undecided = without_decisions(tiny_folder("5.2"), folder / "undecided")

    def make(name: str, recipe: str) -> Job:
        layout = LAYOUTS[name][1] if name in LAYOUTS else Layout()
        hf_dir = undecided if recipe in ("exact", "bf16") else tiny_folder("5.2")
        if recipe == "fp8":
            hf_dir = fp8_folder("5.2")
        return Job(hf_dir, folder / name / recipe, layout, recipe)

    return make


@pytest.fixture(scope="session")
def one(job: Callable[..., Job]) -> One:
    """one(recipe) -> what one process finds; "later" are its steps 4 and 5, after a restart."""
    known: dict[str, dict[str, Any]] = {}

    def get(recipe: str) -> dict[str, Any]:
        recipe = SAME_ALONE.get(recipe, recipe)
        if recipe not in known:
            alone = job("one", recipe)
            found = observe(alone)
            later = resumed_steps(replace(alone, resume_from=alone.out_dir))
            known[recipe] = found | {"later": later, "out_dir": alone.out_dir}
        return known[recipe]

    return get


@pytest.fixture(scope="session")
def ranks(job: Callable[..., Job], one: One) -> Ranks:
    """ranks(name, recipe) -> what each rank of the layout found."""
    known: dict[str, list[Any]] = {}

    def get(name: str, recipe: str) -> list[dict[str, Any]]:
        count, _, recipes = LAYOUTS[name]
        if name not in known:
            jobs = [replace(job(name, r), resume_from=one(r)["out_dir"]) for r in recipes]
            known[name] = run_ranks(results_of(jobs[0]), count, train_and_resume, jobs)
        return [found[recipes.index(recipe)] for found in known[name]]

    return get


def results_of(job: Job) -> Path:
    return job.out_dir.parent / "results"
