"""The adapter that a server samples with: SGLang and vLLM load and unload it by the same calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from glm5.errors import EngineError
from glm5.rl.engines.http import Answer, Server


@dataclass(frozen=True)
class Served:
    """One adapter of a server. loads: how often this client had the server load adapters."""

    name: str
    folder: Path
    loads: int


class ServedAdapter:
    """Which adapter a server is to use, loaded again where the server has forgotten it.

    Every version has a name of its own, under which no server ever knew another adapter: neither a
    prefix cache nor an adapter that the server keeps by its name can be stale.
    """

    def __init__(self, server: Server, prefix: str, remedy: str) -> None:
        """prefix: of the paths; remedy: what a server needs to take adapters."""
        self._server, self._prefix, self._remedy = server, prefix, remedy
        self._run = uuid.uuid4().hex[:8]
        self._lock = Lock()
        self._served: Served | None = None

    @property
    def served(self) -> Served | None:
        """None: the base alone."""
        return self._served

    def load(self, folder: Path, version: int) -> None:
        """Drops the adapter before and loads this one; the server reads the folder itself.

        Raises:
            EngineError: the server does not take it. It is then still the one that is asked for,
            so that nothing is ever sampled without it.
        """
        self.drop()
        self._served = Served(f"glm5-{self._run}-v{version}", folder.resolve(), 1)
        self._load(self._served)

    def drop(self) -> None:
        """Samples from the base alone; a server that has forgotten the adapter is fine."""
        self._drop(self._server.post)

    def leave(self) -> None:
        """As `drop`, for the end: a server that is gone holds nothing."""
        with suppress(EngineError):
            self._drop(self._server.post_once)

    def restore(self, seen: Served) -> None:
        """Loads the adapter again, once for all requests that found it missing."""
        with self._lock:
            if self._served == seen:
                self._load(seen)
                self._served = Served(seen.name, seen.folder, seen.loads + 1)

    def _drop(self, post: Callable[[str, dict[str, Any]], Answer]) -> None:
        served, self._served = self._served, None
        if served is not None:
            post(f"{self._prefix}/unload_lora_adapter", {"lora_name": served.name})

    def _load(self, served: Served) -> None:
        body = {"lora_name": served.name, "lora_path": str(served.folder)}
        answer = self._server.post(f"{self._prefix}/load_lora_adapter", body)
        # after an answer that was lost on its way, the second attempt finds it there
        if not answer.is_ok and "already" not in answer.text:
            raise EngineError(
                f"{self._server.url} did not take the adapter {served.folder}",
                got=answer.said(),
                expected="an adapter folder that the server can read at that path",
                remedy=self._remedy,
            )
