"""How long the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Measures what is done inside [seconds]."""
        start = time.perf_counter()
        yield
        self._parts[name] = time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Of every part, and step_seconds since the start."""
        return {**self._parts, "step_seconds": time.perf_counter() - self._start}
