"""The first signal asks for a stop, the second one is as if glm5 had never been there."""

import os
import signal
from collections.abc import Iterator

import pytest

from glm5.train.stop import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Interrupted(Exception):
    """Raised by the handlers that were there before."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    def handler(number: int, frame: object) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    yield
    for number, old in before.items():
        signal.signal(number, old)


def test_nothing_is_asked_for_by_itself() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest() as stop:
        assert stop.asked_by is None
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_remembered_and_the_second_falls_through(number: int) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.asked_by == signal.Signals(number).name
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)


def test_the_other_signal_falls_through_as_well() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked_by == "SIGTERM"


def test_an_exception_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyError), StopRequest():
        raise KeyError
    assert [signal.getsignal(number) for number in SIGNALS] == before
