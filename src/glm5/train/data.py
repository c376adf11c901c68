"""Read chats from JSONL and Parquet files, and report every bad line with its place."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.train.row import BadRow, messages_of, parse_json, tools_of

MAX_SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Chat:
    """One conversation: messages and tools as the chat template takes them, and its `file:line`."""

    messages: tuple[dict[str, Any], ...]
    source: str
    tools: tuple[dict[str, Any], ...] = ()


@dataclass
class Problems:
    """Collects what is wrong, place by place, so that one error can tell all of it."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, source: str, reason: str) -> None:
        """Note one problem; the first 20 are kept word by word, the rest counted."""
        self.count += 1
        if len(self.shown) < MAX_SHOWN_PROBLEMS:
            self.shown.append(f"{source}: {reason}")

    def raise_if_any(self, what: str, remedy: str | None = None) -> None:
        """Raise one DataError that lists the problems; do nothing when there are none."""
        if not self.count:
            return
        hidden = self.count - len(self.shown)
        lines = [*self.shown, f"... and {hidden} more"] if hidden else self.shown
        raise DataError("\n    ".join([f"{what}: {self.count}", *lines]), remedy=remedy)


def iter_chats(paths: Sequence[Path], *, max_samples: int | None = None) -> Iterator[Chat]:
    """Yield the chats of .jsonl and .parquet files in order, holding one row at a time.

    A row is an object with `messages`: a non-empty list of objects with `role` (system,
    user, assistant or tool) and `content` (a string), at least one of them an assistant's, and
    perhaps `tools`: a list of function schemas, or its JSON as a string. An assistant that has
    `tool_calls` needs no content; the arguments of a call may be an object or its JSON as a string.
    Other columns are ignored; other keys of a message (reasoning_content) go to the chat template.
    A key that is null is as if absent. Blank lines and a byte order mark are skipped.

    Raises:
        DataError: as `iter_rows`.
    """

    def chat(row: Any, source: str) -> Chat:
        return Chat(messages_of(row), source, tools_of(row))

    columns = ("messages", "tools")
    return iter_rows(
        paths, chat, noun="chats", needs=("messages",), columns=columns, max_samples=max_samples
    )


def iter_rows[Row](
    paths: Sequence[Path],
    parse: Callable[[Any, str], Row],
    *,
    noun: str,
    needs: Sequence[str],
    columns: Sequence[str] | None,
    max_samples: int | None = None,
) -> Iterator[Row]:
    """Yield parse(row, `file:line`) of the rows of .jsonl and .parquet files in order.

    parse raises BadRow for a row that cannot be used; `noun` says in messages what rows are. Of a
    Parquet file `columns` are read where it has them (None: all), and it must have one of `needs`.

    Raises:
        DataError: after the last row, when any row was bad: each with file and line (or row)
            number, counted from 1; at once when a file is missing, unreadable or of another
            kind; at the end when there was no row at all.
    """
    problems, num_rows = Problems(), 0
    for source, raw in _iter_raw(paths, needs, columns):
        if num_rows == max_samples:
            break
        try:
            row = parse(_decode(raw), source)
        except BadRow as error:
            problems.add(source, str(error))
            continue
        num_rows += 1
        yield row
    problems.raise_if_any("bad rows in the data")
    if not num_rows:
        raise DataError(f"no {noun} in the data", got=", ".join(str(path) for path in paths))


def _iter_raw(
    paths: Sequence[Path], needs: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[str, Any]]:
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
        ".jsonl": _iter_jsonl,
        ".parquet": partial(_iter_parquet, needs=needs, columns=columns),
    }
    for path in paths:
        reader = readers.get(path.suffix)
        if reader is None:
            raise DataError(f"{path}: unknown kind of data file", expected=" or ".join(readers))
        if not path.is_file():
            raise DataError(f"{path}: no such data file")
        try:
            yield from reader(path)
        except OSError as error:
            raise DataError(f"{path}: cannot read the data file", got=error) from None


def _iter_jsonl(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                yield f"{path}:{number}", line


def _iter_parquet(
    path: Path, needs: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if set(names).isdisjoint(needs):
                raise DataError(f"{path}: no column {' or '.join(needs)}", got=names)
            read = [name for name in names if columns is None or name in columns]
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=read):
                for cells in zip(*batch.columns, strict=True):
                    number += 1
                    yield f"{path}:row {number}", dict(zip(batch.schema.names, cells, strict=True))
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file", got=error) from None


def _decode(raw: Any) -> Any:
    try:
        if isinstance(raw, bytes):
            return parse_json(raw.decode("utf-8"))
        return {name: _without_nulls(cell.as_py()) for name, cell in raw.items()}
    except UnicodeDecodeError as error:
        raise BadRow(f"invalid UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise BadRow(f"unreadable: {error}") from None


def _without_nulls(value: Any) -> Any:
    # Parquet gives every struct all fields of its type; null stands for an absent key.
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
