"""Bars on standard error for work of known length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Hears (`what` done, of how many)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def byte_bar(
    what: str, *, quiet: bool, console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Hears (bytes of `what` done, of how many), and shows GB/s; the first word starts it.

    It ends with the last byte: another bar may follow while this context lasts.
    """
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console or Console(stderr=True), disable=quiet)
    task = bar.add_task(what, total=None)

    def hear(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    try:
        yield hear
    finally:
        bar.stop()
