"""`glm5 train`: overrides, one JSON object, and the exit codes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from glm5.train.metrics import METRICS_FILE, read_metrics
from tests.cli.conftest import Glm5
from tests.hf_folders import rewrite
from tests.rl.running import rl_tables
from tests.tiny_models import TinyFolder
from tests.training import run_tables, write_toml


@pytest.fixture
def run_file(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """A run of two steps into tmp_path/run."""
    tables = run_tables(tiny_folder("5"), tmp_path / "run", train={"steps": 2})
    return write_toml(tmp_path / "run.toml", tables)


def test_it_trains_exports_and_goes_on(glm5: Glm5, run_file: Path, tmp_path: Path) -> None:
    result = glm5("train", run_file, "--set", "optimizer.lr=0.02", "--json")
    assert result.exit_code == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    assert result.json == {"checkpoint": str(checkpoint), "step": 2, "finished": True}
    assert read_metrics(tmp_path / "run")[0]["lr"] == 0.02
    result = glm5("export", tmp_path / "run", tmp_path / "out", "--as", "adapter")
    assert result.exit_code == 0 and "transformers + peft" in result.out
    assert glm5("export", tmp_path / "run", tmp_path / "x", "--as", "hf").exit_code == 2
    result = glm5("train", run_file, "--set", "optimizer.lr=0.02")
    assert result.exit_code == 2 and "finished already" in result.err
    result = glm5("train", run_file, "--set", "train.steps=3")
    assert result.exit_code == 2 and "changed: optimizer.lr" in result.err
    more = ["--set", "train.steps=3", "--set", "optimizer.lr=0.02"]
    result = glm5("train", run_file, *more)
    assert result.exit_code == 0
    assert "resuming from step 2" in result.out and "step 3/3" in result.err
    assert "of them train" in result.out and "train: " in result.out
    result = glm5("train", run_file, *more, "--set", "train.resume=never")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.step=3", "train.steps"),
        ("optimiser.lr=1", "optimizer"),
        ("lora.targets=['q_proj']", "q_a_proj"),
        ("train.steps=0", "train.steps"),
        ("train.global_batch_size=3", "global_batch_size"),
        ("no value", "no value"),
    ],
)
def test_a_wrong_setting_is_told_with_the_nearest_name(
    glm5: Glm5, run_file: Path, tmp_path: Path, override: str, named: str
) -> None:
    more = ["--set", "train.micro_batch_size=2"]
    result = glm5("train", run_file, *more, "--set", override, "--json")
    assert result.exit_code == 2
    assert named in result.err and result.out == ""
    assert not (tmp_path / "run").exists()


def test_an_unknown_key_in_the_file_is_told_with_the_nearest_name(
    glm5: Glm5, run_file: Path
) -> None:
    run_file.write_text(run_file.read_text().replace("steps =", "setps ="))
    result = glm5("train", run_file)
    assert result.exit_code == 2 and "train.setps" in result.err and "train.steps" in result.err
    assert glm5("train", run_file.with_name("none.toml")).exit_code == 2


def test_bad_data_is_2(glm5: Glm5, run_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text("{}\n")
    result = glm5("train", run_file, "--set", f"data.train={json.dumps(str(data))}")
    assert result.exit_code == 2 and f"{data}:1: no messages" in result.err


def test_a_run_that_diverges_is_1_and_saves_nothing(
    glm5: Glm5, tiny_folder: TinyFolder, run_file: Path, tmp_path: Path
) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][0, 0] = math.nan

    folder: Any = rewrite(tiny_folder("5"), tmp_path / "hf", poison)
    result = glm5("train", run_file, "--set", f"model.path={json.dumps(str(folder))}", "--json")
    assert result.exit_code == 1
    assert "diverged at step 1" in result.err and result.out == ""
    (line,) = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert json.loads(line)["loss"] == "NaN"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [METRICS_FILE]


def test_a_file_with_rl_learns_from_rewards(
    glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    tables = rl_tables(tiny_folder("5"), tmp_path / "run", train={"steps": 2})
    file = write_toml(tmp_path / "run.toml", tables)
    result = glm5("train", file, "--set", "rl.group_size=3")
    assert result.exit_code == 0
    assert "prompts: 6" in result.out and "samples of step 2" in result.out
    assert "step 2/2  reward 0." in result.err and "gap" in result.err
    more = ["--set", "rl.group_size=3", "--set", "train.steps=3", "--json"]
    result = glm5("train", file, *more)
    assert result.json["step"] == 3
    assert glm5("export", tmp_path / "run", tmp_path / "out", "--as", "adapter").exit_code == 0
    result = glm5("train", file, "--set", "rl.group_size=4", "--set", "train.steps=4")
    assert result.exit_code == 2 and "changed: rl.group_size" in result.err
    result = glm5("train", file, "--set", "rl.replay='some'")
    assert result.exit_code == 2 and "rl.replay" in result.err
