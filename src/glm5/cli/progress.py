"""A bar on standard error for work of known length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def shard_progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Hears (shards done, of how many)."""
    columns = (TextColumn("shards"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("shards", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
