"""`glm5 bench node-share`: figures as JSON, a limit that is passed, and bad options."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Glm5
from tests.node_share.jobs import run_command
from tests.parallel.processes import run_ranks

SMALL = ("--narrow", "8", "--layers", "2", "--tokens", "24", "--steps", "3")


def test_the_result_adds_up(tmp_path: Path) -> None:
    arguments = [*SMALL, "--layout", "ep=8,cp=8", "--rank", "7", "--document-tokens", "20"]
    ((code, out, _),) = run_ranks(tmp_path, 1, run_command, [*arguments, "--json"])
    found = json.loads(out)
    assert code == "0" and found["fits"] and found["out_of_memory"] == ""
    assert found["gpus"] == 8 and found["tokens_per_step"] == 8 * 24 and found["layers"] == 2
    exchange = sum(kind["link_seconds"] for kind in found["collectives"])
    assert found["exchange_seconds"] == pytest.approx(exchange)
    seconds = found["step_seconds_without_communication"] + exchange
    assert found["tokens_per_second"] == pytest.approx(8 * 24 / seconds)
    assert len(found["steps"]) == 3 and found["predicted_peak_bytes"] > 0


def test_a_share_that_does_not_fit_is_a_failed_check_with_its_parts(tmp_path: Path) -> None:
    arguments = [*SMALL, "--layout", "tp=8,ep=8", "--limit-gib", "0.001"]
    ((code, out, err),) = run_ranks(tmp_path, 1, run_command, arguments)
    assert code == "1" and "the share does not fit" in err
    for part in ("embeddings and head", "gradients", "optimizer", "peak of tensors", "limit"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layout", "pp=2,ep=4"], "not a layout of one node"),
        (["--layout", "ep=16"], "not a layout of one node"),
        (["--layout", "ep=8", "--rank", "8"], "no such rank"),
        (["--layout", "ep=8", "--targets", "q_proj"], "names no linear"),
        (
            ["--layout", "ep=8", "--targets", "o_proj", "--expert-lora", "shared_outer"],
            "--expert-lora shared_outer does nothing",
        ),
        (["--layout", "ep=8", "--adapter-rank", "129"], "routed experts is too large"),
        (["--layout", "ep=8", "--base-weights", "dtype", "--fp8-compute"], "not multiplied"),
        (["--layout", "ep=8", "--layers", "79"], "does not have so many layers"),
        (["--layout", "tp=8", "--narrow", "16"], "num_attention_heads does not divide"),
    ],
)
def test_why_a_bad_one_is_bad(glm5: Glm5, arguments: list[str], text: str) -> None:
    result = glm5("bench", "node-share", *arguments)
    assert result.exit_code == 2 and text in result.err and result.out == ""
