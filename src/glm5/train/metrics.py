"""Metrics of a run: metrics.jsonl, TensorBoard and the terminal, none of which hides a NaN."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from glm5.errors import DataError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# What the progress line shows: metric, label, format.
_SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("eval_loss", "eval", "{:.4f}"),
    ("gap_kl", "gap_kl", "{:.1e}"),
    ("lr", "lr", "{:.2e}"),
    ("tokens_per_second", "tok/s", "{:,.0f}"),
)


class MetricsLog:
    """Writes one line per step, in ascending order; use it on one rank, as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        first_step: int = 1,
        tensorboard: bool = False,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        """Open the log of a run that logs `first_step` next; lines from there on are dropped.

        Args:
            folder: where metrics.jsonl is; made when missing.
            total_steps: where the progress bar ends.
            first_step: number of the first step of this process; 1 for a new run.
            tensorboard: also write event files to folder/tensorboard.
            quiet: show nothing on the terminal.
            console: where the progress goes; absent: standard error.

        Raises:
            DataError: a damaged line in metrics.jsonl that is not the last.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._last_step = first_step - 1
        _drop_lines_from(folder / METRICS_FILE, first_step)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._writer = _open_tensorboard(folder, first_step) if tensorboard else None
        self._display = None if quiet else _Display(console, total_steps, first_step)

    def log(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Write the metrics of `step` (counted from 1), all at once: a step has one line.

        Strings go to metrics.jsonl alone. NaN and infinities are written as the strings "NaN",
        "Infinity" and "-Infinity", which are valid JSON.
        """
        assert step > self._last_step, "steps are logged once, in ascending order"
        self._last_step = step
        line = {"step": step, **{key: _to_json(value) for key, value in values.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {key: float(v) for key, v in values.items() if not isinstance(v, str)}
        if self._writer is not None:
            for key, number in numbers.items():
                self._writer.add_scalar(key, number, step)
        if self._display is not None:
            self._display.show(step, numbers)

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._display is not None:
            self._display.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Display:
    """A progress bar on a terminal; plain lines where there is none, such as a log file."""

    def __init__(self, console: Console | None, total_steps: int, first_step: int) -> None:
        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[metrics]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "train", total=total_steps, completed=first_step - 1, metrics=""
            )
            self._progress.start()

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        shown = [(label, form, numbers[key]) for key, label, form in _SHOWN if key in numbers]
        if self._progress is None:
            text = "  ".join(f"{label} {form.format(value)}" for label, form, value in shown)
            self._console.print(f"step {step}/{self._total}  {text}", highlight=False)
            return
        text = "  ".join(_styled(label, form, value) for label, form, value in shown)
        self._progress.update(self._task, completed=step, metrics=text, refresh=True)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _styled(label: str, form: str, value: float) -> str:
    text = f"{label} {form.format(value)}"
    return text if math.isfinite(value) else f"[bold red]{text}[/]"


def _open_tensorboard(folder: Path, first_step: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what an interrupted run logged after the checkpoint.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)


def _to_json(value: float | int | str) -> float | int | str:
    if isinstance(value, str) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of folder/metrics.jsonl, with non-finite numbers as floats again.

    A last line without its end, as an interrupted write leaves it, is left out; a missing file
    gives no lines.

    Raises:
        DataError: any other line that is not an object with an integer `step`.
    """
    return [
        {key: _NON_FINITE.get(v, v) if isinstance(v, str) else v for key, v in line.items()}
        for line, _ in _parsed_lines(folder / METRICS_FILE)
    ]


def _parsed_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    if not path.exists():
        return []
    parsed = []
    # what is no UTF-8 is no JSON either, and named with its line
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(True)
    for number, text in enumerate(lines, start=1):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise DataError(f"{path}:{number}: not a line of metrics", got=text.strip()[:80])
        parsed.append((line, text))
    return parsed


def _drop_lines_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = [text for line, text in _parsed_lines(path) if line["step"] < first_step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    # Replacing is atomic, so an interruption here loses nothing.
    partial.replace(path)
