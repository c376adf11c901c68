"""A table for people, one JSON object for scripts."""

import json
from pathlib import Path

import pytest

from glm5.cli.output import Output
from glm5.cli.plot import plot_loss


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True)
    output.say("hello")
    output.table("title", ("a",), [(1,)])
    output.result({"a": 1, "b": [True]})
    assert json.loads(capsys.readouterr().out) == {"a": 1, "b": [True]}


def test_text_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=False)
    output.say("path [bold]x[/bold]")
    output.table("title", ("a", "b"), [(True, 0.00012345), (False, "[red]x")])
    output.result({"folder": "/tmp/[a]"})
    text = capsys.readouterr().out
    assert "ok" in text and "FAILED" in text and "1.23e-04" in text
    assert "path [bold]x[/bold]" in text and "[red]x" in text and "/tmp/[a]" in text


def test_a_table_cuts_no_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "model.layers.3.mlp.experts.0.gate_proj.weight"
    Output(as_json=False).table("t", ("gradient", "error", "limit"), [(name, 0.5, 0.5)])
    text = capsys.readouterr().out
    cells = [line.split("\u2502")[1].strip() for line in text.splitlines() if "\u2502" in line]
    assert "".join(cells) == name


def test_the_plot_is_a_picture_whatever_was_evaluated(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "eval_loss": 2.5}]
    for name, metrics in (("with.png", lines), ("without.png", lines[:1])):
        path = plot_loss(metrics, tmp_path / name)
        assert path.read_bytes().startswith(b"\x89PNG")
