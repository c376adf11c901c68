"""One process group and one parallel state per process; another layout over them is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from glm5.errors import ConfigError, LayoutError
from glm5.runtime import distributed
from glm5.runtime.distributed import (
    Layout,
    checked_device,
    current_layout,
    default_device,
    ensure_distributed,
)
from tests.tiny_models import TinyFolder

SRC = Path(__file__).parents[2] / "src"
DEVICE = default_device()


def test_a_second_call_keeps_what_exists() -> None:
    ensure_distributed(DEVICE)
    group = parallel_state.get_tensor_model_parallel_group()
    world = dist.group.WORLD
    ensure_distributed(DEVICE)
    ensure_distributed(DEVICE, Layout())
    assert dist.group.WORLD is world
    assert parallel_state.get_tensor_model_parallel_group() is group
    assert current_layout() == Layout(tp=1, pp=1, cp=1, ep=1)
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_another_layout_over_it_is_refused(axis: str) -> None:
    ensure_distributed(DEVICE)
    with pytest.raises(LayoutError, match=rf"(?s)another layout.*{axis}=2.*destroy"):
        ensure_distributed(DEVICE, Layout(**{axis: 2}))
    assert current_layout() == Layout()


def test_a_restart_seeds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a second model must not rewind the random numbers of a run."""
    ensure_distributed(DEVICE)
    state = torch.get_rng_state()
    ensure_distributed(DEVICE, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert distributed.current_layout() == Layout()


FRESH_PROCESS = """
import sys, torch
import glm5.runtime.distributed as d
from glm5.errors import LayoutError
for bad in (d.Layout(tp=2), d.Layout(ep=2)):
    try:
        d.ensure_distributed(d.default_device(), bad)
    except LayoutError as error:
        assert "does not divide" in str(error) and "on 1 process" in str(error), error
    else:
        raise SystemExit("a layout of two processes started on one")
from glm5.checkpoint.load import load_model
from glm5.model.forward import logits
model = load_model(sys.argv[1])
print("finite", bool(logits(model, torch.arange(9)).isfinite().all()))
"""


def test_a_process_loads_runs_and_ends(tiny_folder: TinyFolder) -> None:
    """No launcher, no teardown: nothing is left that would keep the process alive."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH_PROCESS, str(tiny_folder("5"))],
        cwd=SRC,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "finite True"


def test_a_process_computes_on_its_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert checked_device("cuda") == checked_device("cuda:1") == torch.device("cuda", 1)
    assert checked_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"(?s)current GPU alone.*cuda:0.*cuda:1.*set_device"):
        checked_device("cuda:0")
