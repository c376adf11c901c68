"""Results of a verb: a table for people, one JSON object for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Output:
    """With `as_json` only the result is printed, on standard output; else text and tables are."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console()

    def say(self, text: str) -> None:
        """A line on the way to the result."""
        if not self.as_json:
            self._print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; booleans are shown as ok or FAILED."""
        if self.as_json:
            return
        table = Table(title=escape(title), title_justify="left")
        for name in columns:
            # a long name goes on in the next line: cut, it would name nothing
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        self.console.print(table)

    def show(self, table: Table) -> None:
        """A table that somebody else has made."""
        if not self.as_json:
            self.console.print(table)

    def columns(self, title: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table without a frame, never cut or wrapped: text to the left, numbers to the right."""
        left = [isinstance(cell, str) for cell in rows[0]]
        cells = [names, *([_short(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        self.say(title)
        for row in cells:
            aligned = (
                cell.ljust(width) if to_left else cell.rjust(width)
                for cell, width, to_left in zip(row, widths, left, strict=True)
            )
            self.say("  ".join(aligned).rstrip())

    def result(self, values: Mapping[str, Any]) -> None:
        """The result itself."""
        if self.as_json:
            print(json.dumps(_plain(values), indent=2, allow_nan=False))
            return
        for key, value in values.items():
            self._print(f"{key}: {value}")

    def _print(self, text: str) -> None:
        # whole lines, and brackets in a path are no markup
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    """NaN and infinities as strings: visible, and valid JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "[green]ok[/green]" if value else "[bold red]FAILED[/bold red]"
    return f"{value:.2e}" if isinstance(value, float) else escape(str(value))


def _short(value: str | int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
