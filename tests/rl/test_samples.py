"""Sample tables: what is written can be read again, and what is shown cannot do anything."""

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from glm5.rl.printable import printable
from glm5.rl.samples import (
    SHOWN_CHARS,
    Sample,
    pick_samples,
    sample_table,
    samples_file,
    write_samples,
)

SAMPLE = Sample(
    request="step 3 prompt 1 sample 0",
    prompt="2+2?",
    completion="it is 4",
    label="4",
    reward=1.0,
    advantage=0.75,
    num_tokens=3,
    finish="stop",
    abs_diff=0.01,
)
NASTY = "\x1b[2J\x1b]0;title\x07\r\u202eabc\u200b\x9b31m\x00 [red]bold[/red] \\n \u4f60 caf\u00e9"


def rendered(*samples: Sample) -> str:
    console = Console(file=io.StringIO(), width=400, force_terminal=False, color_system=None)
    console.print(sample_table(3, samples))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_written_samples_can_be_read_again(tmp_path: Path) -> None:
    samples = [
        SAMPLE,
        replace(SAMPLE, label=None, advantage=None, finish="length", completion=NASTY),
        replace(SAMPLE, label=4, completion="\ud800 two\nlines"),
    ]
    path = write_samples(tmp_path, 3, samples)
    assert path == samples_file(tmp_path, 3) == tmp_path / "samples" / "step-00000003.jsonl"
    raw = path.read_bytes()
    assert raw.isascii() and not set(raw) & set(b"\x1b\x07\r\x00")
    assert [json.loads(line) for line in raw.splitlines()] == [asdict(s) for s in samples]


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_what_is_not_finite_is_valid_json_and_seen(tmp_path: Path, value: float, text: str) -> None:
    path = write_samples(tmp_path, 1, [replace(SAMPLE, abs_diff=value)])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(path.read_text(), parse_constant=refuse)["abs_diff"] == text


def test_a_step_that_is_run_again_replaces_its_table(tmp_path: Path) -> None:
    write_samples(tmp_path, 2, [SAMPLE] * 3)
    path = write_samples(tmp_path, 2, [SAMPLE])
    assert len(path.read_text().splitlines()) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_table_shows_every_sample() -> None:
    text = rendered(SAMPLE, replace(SAMPLE, advantage=None, reward=0.0, completion="it is 5"))
    assert "samples of step 3" in text
    assert all(part in text for part in ("0.75", "it is 4", "it is 5", "2+2?", "stop"))
    assert any(line.split()[1:4:2] == ["0", "-"] for line in text.splitlines() if "it is 5" in line)


def test_what_a_model_wrote_does_nothing_to_the_terminal() -> None:
    text = rendered(replace(SAMPLE, completion=NASTY, prompt=NASTY, label=NASTY))
    assert not set(text) & set("\x1b\x07\r\u202e\u200b\x9b\x00")
    # neither markup nor what can be printed is lost
    assert text.count("[red]bold[/red]") == 3 and text.count("\u4f60 caf\u00e9") == 3


def test_printable_is_one_line_and_tells_a_backslash_from_an_escape() -> None:
    assert printable("a\nb\t\\n") == "a\\nb\\t\\\\n"
    assert printable(NASTY).isprintable()
    assert printable("\ud800") == "\\ud800"
    assert printable("caf\u00e9 \u4f60") == "caf\u00e9 \u4f60"


def test_long_texts_keep_both_ends() -> None:
    text = rendered(replace(SAMPLE, completion=f"start{'x' * 1000}end"))
    assert "start" in text and "xend" in text and " ... " in text
    assert text.count("x") <= SHOWN_CHARS


@pytest.mark.parametrize(
    ("count", "rewards"),
    [(0, []), (1, [9]), (2, [9, 0]), (4, [9, 6, 3, 0]), (20, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0])],
)
def test_the_screen_gets_the_best_and_the_worst(count: int, rewards: list[float]) -> None:
    samples = [replace(SAMPLE, reward=float(reward)) for reward in (3, 1, 4, 0, 5, 9, 2, 6, 7, 8)]
    found = [sample.reward for sample in pick_samples(samples, count)]
    assert found == rewards
