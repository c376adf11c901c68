"""A real process is stopped by a real signal, ends well, and goes on to the same weights."""

import json
import signal
from pathlib import Path

import pytest

from glm5.checkpoint.ckpt_dir import saved_steps
from glm5.train.metrics import METRICS_FILE
from glm5.train.run import train
from tests.e2e.processes import run, start, wait_until
from tests.tiny_models import TinyFolder
from tests.training import (
    differing,
    metrics_without_timing,
    run_config,
    run_tables,
    saved_state,
    write_toml,
)

STEPS = 20


@pytest.fixture(scope="module")
def whole(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(run_config(tiny_folder("5"), out, train={"steps": STEPS}), quiet=True)
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_and_resumed(
    tiny_folder: TinyFolder, tmp_path: Path, whole: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    tables = run_tables(tiny_folder("5"), out, train={"steps": STEPS})
    file = write_toml(tmp_path / "run.toml", tables)
    command = start(tmp_path, "train", file, "--json")
    metrics = out / METRICS_FILE
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    command.send(number)
    assert command.exit_code() == 0, command.stderr()
    result = json.loads(command.stdout())
    assert result["finished"] is False and 2 <= result["step"] < STEPS
    assert saved_steps(out) == [result["step"]]
    result = json.loads(run(tmp_path, "train", file, "--json").stdout())
    assert (result["finished"], result["step"]) == (True, STEPS)
    assert metrics_without_timing(out) == metrics_without_timing(whole)
    assert differing(saved_state(out, STEPS), saved_state(whole, STEPS)) == []
