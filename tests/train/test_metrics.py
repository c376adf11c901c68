"""The metrics log: one line per step, valid JSON with visible NaN, clean after a resume."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from glm5.errors import DataError
from glm5.train.metrics import METRICS_FILE, MetricsLog, read_metrics


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder)]


def quiet_log(folder: Path, first_step: int = 1) -> MetricsLog:
    return MetricsLog(folder, total_steps=10, first_step=first_step, quiet=True)


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with quiet_log(folder) as log:
        log.log(1, {"loss": 2.5, "tokens": 7, "phase": "train"})
        text = (folder / METRICS_FILE).read_text(encoding="utf-8")
        assert json.loads(text) == {"step": 1, "loss": 2.5, "tokens": 7, "phase": "train"}
        assert text.endswith("\n")
        log.log(3, {"loss": 2.0})
    assert steps(folder) == [1, 3]


def test_non_finite_numbers_are_visible_and_valid_json(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    with quiet_log(tmp_path) as log:
        log.log(1, values)

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    text = (tmp_path / METRICS_FILE).read_text(encoding="utf-8")
    line = json.loads(text, parse_constant=refuse)
    assert line == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.0}
    back = read_metrics(tmp_path)[0]
    assert math.isnan(back["a"])
    assert (back["b"], back["c"], back["d"]) == (math.inf, -math.inf, 1.0)


@pytest.mark.parametrize("first_step", [1, 2, 3, 4, 9])
def test_resume_drops_the_steps_that_run_again(tmp_path: Path, first_step: int) -> None:
    with quiet_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": 1.0})
    with quiet_log(tmp_path, first_step) as log:
        log.log(first_step, {"loss": 2.0})
    kept = [step for step in (1, 2, 3) if step < first_step]
    assert steps(tmp_path) == [*kept, first_step]
    assert read_metrics(tmp_path)[-1]["loss"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_half_a_last_line_is_dropped(tmp_path: Path) -> None:
    with quiet_log(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    with (tmp_path / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    assert steps(tmp_path) == [1]
    with quiet_log(tmp_path, first_step=2) as log:
        log.log(2, {"loss": 3.0})
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("bad", ["{", "[]", "{}", '{"step": "1"}', '{"step": true}', ""])
def test_damage_in_the_middle_is_named_and_nothing_is_lost(tmp_path: Path, bad: str) -> None:
    path = tmp_path / METRICS_FILE
    text = f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n'
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"{METRICS_FILE}:2"):
        quiet_log(tmp_path, first_step=4)
    assert path.read_text(encoding="utf-8") == text
    path.write_bytes(b'{"step": 1}\n{"step": 2, "x": "\xff"}\n{"step": 3}x\n')
    with pytest.raises(DataError, match=f"{METRICS_FILE}:3"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("step", [1, 2])
def test_step_is_logged_once(tmp_path: Path, step: int) -> None:
    with quiet_log(tmp_path) as log:
        log.log(2, {"loss": 1.0})
        with pytest.raises(AssertionError, match="once"):
            log.log(step, {"loss": 1.0})


def test_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_close_twice_is_fine(tmp_path: Path) -> None:
    log = quiet_log(tmp_path)
    log.close()
    log.close()


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=120)
    with MetricsLog(tmp_path, total_steps=10, console=console) as log:
        log.log(1, {"loss": math.nan, "lr": 1e-4, "tokens_per_second": 1234.5, "grad_norm": 1.0})
        log.log(2, {"eval_loss": 3.0})
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.splitlines() == [
        "step 1/10  loss nan  lr 1.00e-04  tok/s 1,234",
        "step 2/10  eval 3.0000",
    ]


def test_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a terminal that calls itself dumb gets no bar
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with MetricsLog(tmp_path, total_steps=10, first_step=4, console=console) as log:
        log.log(4, {"loss": 1.25, "lr": 1e-4})
        log.log(5, {"loss": math.nan})
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("3/10", "4/10", "5/10", "loss 1.2500", "lr 1.00e-04", "loss nan", "ETA"):
        assert text in shown


def test_quiet_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_log(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    assert capfd.readouterr() == ("", "")


def test_tensorboard_gets_the_numbers_and_forgets_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, loss in ((1, 1.0), (3, 5.0)):
        with MetricsLog(
            tmp_path, total_steps=4, first_step=first_step, tensorboard=True, quiet=True
        ) as log:
            for step in range(first_step, 5):
                log.log(step, {"loss": loss, "phase": "train"})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 5.0),
        (4, 5.0),
    ]


def test_no_tensorboard_folder_unless_asked(tmp_path: Path) -> None:
    with quiet_log(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    assert not (tmp_path / "tensorboard").exists()
