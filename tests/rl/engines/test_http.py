"""Waiting between attempts, what is kept of an answer, and errors of the client itself."""

import pytest
from fastapi import FastAPI

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
