"""Ctrl-C and SIGTERM end a run after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that a stop was asked for; a second signal falls through to the old handlers."""

    def __init__(self) -> None:
        self.asked_by: str | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked_by = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
