"""Bad input in several processes: every rank says what is wrong, none waits, nothing is lost."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5.checkpoint.ckpt_dir import STEPS_FOLDER, saved_steps, step_folder
from glm5.runtime.distributed import Layout
from tests.parallel.conftest import One
from tests.parallel.failures import Refusal, die_while_saving, hang_while_saving, refusals
from tests.parallel.jobs import LAST_STEP, Job, one_step_more
from tests.parallel.processes import run_ranks

MakeJob = Callable[..., Job]
WRONG_LAYOUTS = {
    "tp3": Layout(tp=3),
    "tp4": Layout(tp=4),
    "pp2cp2": Layout(pp=2, cp=2),
    "ep3": Layout(ep=3),
    "ep2pp2": Layout(ep=2, pp=2),
    "ep2etp2": Layout(ep=2, etp=2),
}


@pytest.fixture(scope="module")
def refused(
    job: MakeJob, one: One, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What each of two ranks says to each bad input; all in one start."""
    saved = one("adapters")["out_dir"]
    less = tmp_path_factory.mktemp("bad") / "less"
    shutil.copytree(saved, less)
    shard = next(step_folder(less, LAST_STEP).glob("mcore/*.distcp"))
    shard.unlink()
    base = job("bad", "adapters")
    cases = [Refusal(name, layout=layout) for name, layout in WRONG_LAYOUTS.items()]
    cases += [
        Refusal("interleaved alone", layout=Layout(vpp=2)),
        Refusal("missing shard", load=replace(base, resume_from=less)),
        Refusal("another rank", load=replace(base, resume_from=saved, adapter_rank=4)),
        Refusal("odd row", odd_row=Layout(cp=2)),
    ]
    return run_ranks(base.out_dir / "results", 2, refusals, cases)


@pytest.mark.parametrize("name", WRONG_LAYOUTS)
def test_a_layout_that_does_not_divide_the_processes(
    refused: list[dict[str, str]], name: str
) -> None:
    for messages in refused:
        assert "does not divide" in messages[name] and "2 process(es)" in messages[name]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("interleaved alone", ("interleaved", "vpp 2 with pp 1")),
        ("missing shard", ("is damaged", "distcp", "use another checkpoint")),
        ("another rank", ("cannot be loaded", "pairs.")),
        ("odd row", ("does not divide over the context-parallel ranks", "29 tokens over 2 ranks")),
    ],
)
def test_what_cannot_be_loaded_or_cut(
    refused: list[dict[str, str]], name: str, parts: tuple[str, ...]
) -> None:
    for messages in refused:
        assert all(part in messages[name] for part in parts), messages[name]


def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(job: MakeJob, one: One) -> None:
    alone = job("dying", "adapters")
    shutil.copytree(one("adapters")["out_dir"], alone.out_dir)
    dying = replace(alone, resume_from=alone.out_dir)
    (message,) = run_ranks(
        alone.out_dir / "results", 2, die_while_saving, dying, LAST_STEP, dying_rank=1
    )
    assert "another process ended or hung while step-00000004 was being saved" in message
    assert "resume from them" in message
    assert saved_steps(alone.out_dir) == [LAST_STEP]
    assert left_over(alone.out_dir) == []
    # and a restart goes on as if nothing had been
    again = one_step_more(dying, LAST_STEP)
    assert again["loss"] == pytest.approx(one("adapters")["later"][0]["loss"], rel=1e-6)


def test_a_rank_that_hangs_in_a_save_is_waited_for_no_longer_than_the_time_out(
    job: MakeJob, one: One
) -> None:
    alone = job("hanging", "adapters")
    shutil.copytree(one("adapters")["out_dir"], alone.out_dir)
    hanging = replace(alone, resume_from=alone.out_dir)
    (message,) = run_ranks(
        alone.out_dir / "results", 2, hang_while_saving, hanging, LAST_STEP, 1 / 6, dying_rank=1
    )
    assert "another process ended or hung while step-00000004 was being saved" in message
    assert saved_steps(alone.out_dir) == [LAST_STEP]
    assert left_over(alone.out_dir) == []


def left_over(run_dir: Path) -> list[str]:
    names: list[Any] = [path.name for path in (run_dir / STEPS_FOLDER).iterdir()]
    return [name for name in names if name.startswith(".")]
