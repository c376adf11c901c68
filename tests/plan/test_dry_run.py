"""Every rank's shard of a layout, on tiny models: right ones pass, each kind of mistake is told."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.checkpoint.glm5_rules import mtp_hf_names
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.model.schedule import nearest_split
from glm5.plan import worker
from glm5.plan.memory import stage_elements, stages_of
from glm5.plan.shards import ShardJob
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout
from tests.parallel.processes import run_ranks
from tests.plan.jobs import EXPERT, O_PROJ, Case, run_cases

RIGHT = {
    "one rank": Case(mtp=True),
    "every axis": Case({"tp": 2, "pp": 2, "ep": 4}),
    "uneven stages": Case({"pp": 4, "ep": 8}, split=(1, 1, 4, 1)),
    "mtp on the last stage": Case({"pp": 2, "ep": 2}, mtp=True),
    "an indexer on every layer": Case({"tp": 4, "pp": 3}, variant="5"),
    "float8": Case({"tp": 2, "pp": 2, "ep": 2}, fp8=True),
    "context parallelism repeats": Case({"cp": 4, "pp": 2}),
    "interleaved stages": Case({"pp": 2, "vpp": 2, "tp": 2}),
    "experts cut inside": Case({"tp": 2, "ep": 2, "etp": 4}),
    "mtp over tp": Case({"tp": 2, "ep": 2}, mtp=True),
    "mtp over cp": Case({"cp": 2, "ep": 2}, mtp=True),
}
WRONG = {
    "a missing part": (Case({"tp": 2}, wrong="FirstPart", name=O_PROJ), O_PROJ),
    "read twice": (Case({"tp": 2}, wrong="ReadTwice", name=O_PROJ), "read twice by the same rank"),
    "another order": (Case({"ep": 2}, wrong="UpFirst", name=EXPERT), "in another order"),
    "heads": (Case({"tp": 3}), "num_attention_heads does not divide"),
    "experts": (Case({"ep": 16}), "n_routed_experts does not divide"),
    "a shared start": (Case({"pp": 2}, split=(4, 3)), "use layers per stage [2, 5]"),
    "interleaved on one rank": (Case({"vpp": 2}), "cannot be interleaved on one pipeline rank"),
}

Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """found(name) -> what the dry run of that name came to; all run in one process."""
    cases = RIGHT | {name: case for name, (case, _) in WRONG.items()}
    folder = tmp_path_factory.mktemp("dry")
    (results,) = run_ranks(folder, 1, run_cases, list(cases.values()))
    return dict(zip(cases, results, strict=True)).__getitem__


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_layout_holds_every_tensor(found: Found, name: str) -> None:
    case, result = RIGHT[name], found(name)
    tensors = hf_tensors(case.config())
    mtp = mtp_hf_names(case.config())
    scales = sum(tensor.quantisable for tensor in tensors.values()) if case.fp8 else 0
    mtp_scales = sum(tensors[name].quantisable for name in mtp) if case.fp8 else 0
    left_out = 0 if case.mtp else len(mtp) + mtp_scales
    assert result.get("text") is None
    assert result["left_out"] == left_out
    assert result["tensors"] == len(tensors) + scales - left_out
    tp, pp, ep, etp = (case.layout.get(axis, 1) for axis in ("tp", "pp", "ep", "etp"))
    assert result["shards"] == max(tp, ep * etp) * pp


@pytest.mark.parametrize("name", [name for name in RIGHT if not RIGHT[name].mtp])
def test_the_planner_counts_what_the_shards_hold(found: Found, name: str) -> None:
    case = RIGHT[name]
    glm5, layout = case.config(), Layout(**case.layout)
    split = case.split or nearest_split(glm5, layout.pp * layout.vpp)
    stages = stages_of(glm5, split, layout.pp)
    for stage, ranks in zip(stages, found(name)["elements"], strict=True):
        counted = stage_elements(glm5, stage, layout, Workload(mode="full")).total
        assert set(ranks) == {counted}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_told(found: Found, name: str) -> None:
    result = found(name)
    text = WRONG[name][1]
    assert text in result["text"]
    in_shards = name in ("a missing part", "read twice", "another order")
    assert result["error"] == ("CheckFailedError" if in_shards else "LayoutError")


def test_a_worker_says_nothing(tmp_path: Path) -> None:
    """The libraries that it imports would tell again what the main process has told."""
    case = Case()
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps(ShardJob(case.config(), Layout(), case.rules())))
    code = (
        f"import sys; sys.path.insert(0, {str(Path(worker.__file__).parents[2])!r})\n"
        "from glm5.plan.worker import build_chunk, start_worker\n"
        f"start_worker(open({str(job)!r}, 'rb').read()); print(len(build_chunk([0])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
