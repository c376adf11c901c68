"""Runs a FastAPI application in a thread, and lets answers go wrong on demand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Faults:
    """What goes wrong next: each answer of a path takes one entry of its queue, None being none."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Any]] = {}
        self._lock = threading.Lock()
        self.num_requests: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0

    def add(self, path: str, *faults: Any) -> None:
        """A status, a number of seconds (float), "drop", or a change of the right answer."""
        self._queues.setdefault(path, deque()).extend(faults)

    def answer(self, path: str, right: Callable[[], JSONResponse]) -> Response:
        with self._lock:
            self.num_requests[path] += 1
            queue = self._queues.get(path)
            fault = queue.popleft() if queue else None
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self._answer(fault, right)
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, fault: Any, right: Callable[[], JSONResponse]) -> Response:
        if fault is None:
            return right()
        if fault == "drop":
            return _Dropped()
        if isinstance(fault, int):
            return JSONResponse({"error": {"message": "injected"}}, fault)
        if isinstance(fault, float):
            time.sleep(fault)
            return right()
        return _changed(right(), fault)


class _Dropped(Response):
    """Breaks the connection in the middle of the body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"100"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ConnectionAbortedError


def _changed(right: JSONResponse, change: Change) -> Response:
    content = change(json.loads(bytes(right.body)))
    # as lenient as a server that writes NaN
    return Response(json.dumps(content), media_type="application/json")


@contextmanager
def running(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The URL of the application while it runs; port 0 takes a free one."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
