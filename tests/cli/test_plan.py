"""`glm5 plan`: layouts listed, one explained, one dry-run; a recipe that trains; bad input."""

import json
from pathlib import Path

import pytest

from glm5.train.run_config import RunConfig
from tests.cli.conftest import Glm5
from tests.parallel.processes import run_ranks
from tests.plan.jobs import run_command
from tests.tiny_models import TinyFolder

MEMORY = ("weights", "gradients", "optimizer", "activations", "buffers", "transient")


def test_the_best_layout_becomes_a_recipe(glm5: Glm5, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    result = glm5("plan", "GLM-5.2", "--gpus", 16, "--gpu-memory-gib", 180, "--out", path, "--json")
    assert result.exit_code == 0
    found = result.json
    best = found["best"]
    assert best == found["layouts"][0] and best["fits"] and found["recipe"] == str(path)
    run = RunConfig.from_toml(path)
    assert run.layout.ep == best["layout"]["ep"] and run.layout.pp == best["layout"]["pp"]
    assert run.model.recompute == best["recompute"]
    peaks = [sum(stage["memory_bytes"].values()) for stage in best["stages"]]
    assert max(peaks) == best["peak_bytes"] < best["needed_bytes"] <= 180 * 2**30


def test_the_list_says_what_fits(glm5: Glm5) -> None:
    result = glm5("plan", "GLM-5.2", "--gpus", 16, "--gpu-memory-gib", 180)
    assert result.exit_code == 0
    assert "tokens/s at most" in result.out and "best: " in result.out


def test_the_parts_of_the_best_one_are_listed(glm5: Glm5) -> None:
    arguments = ("plan", "GLM-5.2", "--gpus", 16, "--gpu-memory-gib", 180)
    best = glm5(*arguments, "--json").json["best"]
    lines = [line.split() for line in glm5(*arguments).out.splitlines()]
    head = lines.index(["pp", *MEMORY, "peak", "ms"])
    for rank, stage in enumerate(best["stages"]):
        gib = [f"{stage['memory_bytes'][name] / 2**30:.1f}" for name in MEMORY]
        assert lines[head + 1 + rank][: 1 + len(MEMORY)] == [str(rank), *gib]


def test_nothing_fits(glm5: Glm5, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    result = glm5("plan", "GLM-5.2", "--gpus", 2, "--out", path)
    assert result.exit_code == 1
    assert "none fits into 141 GiB" in result.out and "use more GPUs" in result.out
    assert not path.exists()


def test_float8_weights_fit_into_a_node(glm5: Glm5, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    arguments = ("plan", "GLM-5.2", "--gpus", 8, "--seq-len", 65536)
    assert glm5(*arguments).exit_code == 1
    result = glm5(*arguments, "--base-weights", "fp8", "--out", path)
    assert result.exit_code == 0 and "lora over FP8 weights" in result.out
    assert RunConfig.from_toml(path).model.base_weights == "fp8"


def test_the_adapters_of_a_run_are_counted(glm5: Glm5, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    arguments = ("plan", "GLM-5.2", "--layout", "ep=8,cp=8", "--seq-len", 65536)
    arguments = (*arguments, "--base-weights", "fp8")
    adapters = ("--targets", "o_proj, up_proj,down_proj", "--adapter-rank", 8)
    adapters = (*adapters, "--expert-lora", "shared_outer")
    few = glm5(*arguments, "--json").json["best"]
    many = glm5(*arguments, *adapters, "--out", path, "--json").json["best"]
    assert (
        many["stages"][0]["memory_bytes"]["gradients"]
        > few["stages"][0]["memory_bytes"]["gradients"]
    )
    lora = RunConfig.from_toml(path).lora
    assert lora is not None and lora.rank == 8 and lora.expert_lora == "shared_outer"
    assert lora.targets == ("o_proj", "up_proj", "down_proj")


def test_a_layout_is_drawn_whole(glm5: Glm5, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the width of a pipe or a log, one line for each stage."""
    monkeypatch.setenv("COLUMNS", "80")
    split = "18,20,20,20"
    result = glm5("plan", "GLM-5.2", "--layout", "pp=4,ep=16", "--layers-per-stage", split)
    assert result.exit_code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert ["0", "0-17", "FFFsssFsssFsssFsss", "dddMMMMMMMMMMMMMMM"] in lines
    assert ["3", "58-77", "FsssFsssFsssFsssFsss", "M" * 20] in lines
    assert ["pp", *MEMORY, "peak", "ms"] in lines
    assert "64 GPUs" in result.out


def test_interleaved_stages_are_drawn_in_one_line(glm5: Glm5) -> None:
    result = glm5("plan", "GLM-5.2", "--layout", "pp=4,vpp=2,ep=16")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "0 0-9, 38-49 FFFsssFsss FsssFsssFsss dddMMMMMMM MMMMMMMMMMMM" in lines


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--layout", "tp=3"], "num_attention_heads does not divide"),
        (["--layout", "pp=4", "--layers-per-stage", "20,20,20,18"], "starts on layer 20"),
        (["--layout", "pp=4", "--layers-per-stage", "x"], "not a list of numbers"),
        (["--layout", "vpp=2"], "cannot be interleaved on one pipeline rank"),
        (["--layout", "pp=4", "--layers-per-stage", "40,38"], "4 positive numbers"),
        (["--layout", "tp=8", "--gpus", "12"], "does not divide the processes"),
        (["--layout", "rank=8"], "this is not a layout"),
        (["--gpus", "8", "--dry-run"], "nothing to plan for"),
        (["--layout", "tp=8", "--mtp"], "--mtp without --dry-run"),
        (["--layout", "tp=8", "--dry-run", "--out", "run.toml"], "writes no run file"),
        (["--gpus", "8", "--mode", "full", "--base-weights", "fp8"], "float8 do not train"),
        (["--gpus", "8", "--out", "nosuch/run.toml"], "no folder for nosuch/run.toml"),
        (["--gpus", "8", "--targets", "q_proj"], "names no linear of the model"),
        (["--gpus", "8", "--targets", "o_proj,o_proj"], "names a linear twice"),
        (["--gpus", "8", "--expert-lora", "none"], "--expert-lora none does nothing"),
        (
            ["--gpus", "8", "--targets", "up_proj", "--adapter-rank", "129"],
            "routed experts is too large",
        ),
        (["--gpus", "8", "--mode", "full", "--adapter-rank", "8"], "would do nothing"),
        (["--layout", "tp=8", "--dry-run", "--targets", "o_proj"], "would do nothing"),
        ([], "nothing to plan for"),
    ],
)
def test_why_a_bad_one_is_bad(glm5: Glm5, args: list[str], text: str) -> None:
    result = glm5("plan", "GLM-5.2", *args)
    assert result.exit_code == 2
    assert text in result.err and result.out == ""


def test_a_run_file_is_not_overwritten(glm5: Glm5, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("edited")
    result = glm5("plan", "GLM-5.2", "--layout", "tp=8,pp=4,ep=8", "--out", path)
    assert result.exit_code == 2 and f"{path} already exists" in result.err
    assert path.read_text() == "edited"


def test_an_unknown_model(glm5: Glm5, tmp_path: Path) -> None:
    result = glm5("plan", tmp_path / "nosuch", "--gpus", 8)
    assert result.exit_code == 2 and "nosuch" in result.err


def test_a_dry_run_reports(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    arguments = [str(tiny_folder("5.2")), "--layout", "tp=2,pp=2", "--gpus", "8", "--dry-run"]
    ((code, out),) = run_ranks(tmp_path, 1, run_command, [*arguments, "--json"])
    assert code == "0"
    found = json.loads(out)
    assert found["ok"] and found["num_shards"] == 4 and found["num_left_out"] > 0
