"""Waiting between attempts, what is kept of an answer, and errors of the client itself."""

import os
import signal
import threading
import time

import pytest
from fastapi import FastAPI
from starlette.responses import Response

from glm5.errors import EngineError
from glm5.rl.engines import http
from glm5.rl.engines.http import HttpOptions, Server
from tests.rl.engines.serving import running


def test_pauses_double_up_to_the_longest_and_part() -> None:
    server = Server("http://nowhere", HttpOptions(backoff_s=1.0, max_backoff_s=5.0))
    for attempt, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (9, 5.0)):
        pauses = {server._pause(attempt) for _ in range(20)}
        assert len(pauses) > 1
        assert longest / 2 <= min(pauses) <= max(pauses) <= longest


def test_nothing_to_do_starts_no_thread() -> None:
    assert Server("http://nowhere", HttpOptions()).map(lambda item: 1 / 0, []) == []


def test_the_first_error_in_order_is_raised() -> None:
    server = Server("http://nowhere", HttpOptions(num_in_flight=2))
    assert server.map(lambda item: item + 1, range(9)) == list(range(1, 10))
    with pytest.raises(ZeroDivisionError):
        server.map(lambda item: 1 / item, [1, 0, 1])


def test_the_text_of_a_long_answer_is_cut_and_its_content_is_not() -> None:
    app, record = FastAPI(), "\u00e9" * 20_000
    app.get("/record")(lambda: {"record": record})
    with running(app) as url:
        answer = Server(url, HttpOptions()).get("/record")
    assert answer.json == {"record": record}
    # two bytes a letter; half of one at the cut
    assert answer.text.startswith('{"record":"\u00e9') and len(answer.text) < 5_010


def test_an_interrupted_process_does_not_wait_for_a_server_that_hangs() -> None:
    server = Server("http://nowhere", HttpOptions(num_in_flight=2))
    answered, begun = threading.Event(), []

    def work(item: int) -> None:
        begun.append(item)
        answered.wait(20)

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        server.map(work, range(9))
    assert time.monotonic() - started < 10
    # nothing keeps the interpreter from ending
    assert all(thread.daemon for thread in threading.enumerate() if not _is_main(thread))
    answered.set()
    time.sleep(0.1)
    assert sorted(begun) == [0, 1]


def _is_main(thread: threading.Thread) -> bool:
    return thread is threading.main_thread()


@pytest.mark.parametrize(
    "url", ["localhost:1", "http://", "http://[::1", "http://host:port", "http://a\0b"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(EngineError, match="no URL of a server"):
        Server(url, HttpOptions())


def test_a_host_that_no_resolver_takes() -> None:
    server = Server(f"http://{'a' * 300}", HttpOptions())
    with pytest.raises(EngineError, match="no URL of a server"):
        server.get("/health")


def test_what_a_server_knows_must_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_QUICK_S", 0.3)
    app = FastAPI()

    def slow() -> str:
        time.sleep(1.0)
        return "done"

    app.get("/slow")(slow)
    app.post("/slow")(slow)
    with running(app) as url:
        server = Server(url, HttpOptions(read_timeout_s=60.0, max_attempts=1))
        assert server.post("/slow", {}).json == "done"
        for ask in (lambda: server.get("/slow"), lambda: server.post_once("/slow", {})):
            with pytest.raises(EngineError, match=r"(?s)did not answer in time.*0\.3 s"):
                ask()


def test_bodies_that_cannot_be_read() -> None:
    app = FastAPI()
    compressed = {"content-encoding": "gzip"}
    app.get("/gzip")(lambda: Response(b"not compressed", headers=compressed))
    app.get("/deep")(lambda: Response(b"[" * 100_000))
    with running(app) as url:
        server = Server(url, HttpOptions(max_attempts=2, backoff_s=0.01))
        with pytest.raises(EngineError, match=r"(?s)does not answer.*DecodingError.*2 attempts"):
            server.get("/gzip")
        assert server.get("/deep").json is None
