"""Of several processes with errors the right one tells each."""

import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from glm5.cli import process
from glm5.errors import ConfigError
from glm5.runtime import failures
from glm5.runtime.failures import rank_of_many, tells, told_by


class Ranks:
    """ranks(2): from now on this process is rank 2 of 4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        self._patch = monkeypatch
        given = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (given | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)

    def __call__(self, rank: int) -> None:
        self._patch.setenv("RANK", str(rank))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(failures, "WAIT_SECONDS", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    made = Ranks(monkeypatch, store.port)
    # the store lives as long as what the test holds
    made.store = store  # type: ignore[attr-defined]
    return made


def test_a_process_alone_tells_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert rank_of_many() is None
    assert tells("bad") and tells("bad")
    assert told_by() is None


def test_rank_0_tells_what_all_have(ranks: Ranks) -> None:
    told = []
    for rank in range(4):
        ranks(rank)
        told.append(tells("bad"))
    assert told == [True, False, False, False]


def test_one_rank_tells_what_rank_0_does_not_know(ranks: Ranks) -> None:
    ranks(0)
    assert tells("of rank 0")
    told = []
    for rank in (2, 3):
        ranks(rank)
        told.append(tells("of the others"))
    assert told == [True, False]


def test_the_first_rank_with_an_error_is_known(ranks: Ranks) -> None:
    ranks(1)
    assert told_by() is None
    ranks(2)
    assert tells("bad")
    # its own error is no other rank's
    assert told_by() is None
    for rank in (0, 1, 3):
        ranks(rank)
        assert told_by() == 2


def test_processes_that_are_started_again_tell_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(1)
    assert tells("bad") and not tells("bad")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert told_by() is None
    assert tells("bad")


def test_without_a_store_everyone_tells(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing listens there
    monkeypatch.setenv("MASTER_PORT", "1")
    for rank in (0, 1):
        ranks(rank)
        assert tells("bad")
        assert told_by() is None


def command(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """(exit code, standard error) of a command that raises `error`."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(process, "app", fail)
    monkeypatch.setattr(process, "_shut_down", lambda: None)
    monkeypatch.setattr("glm5.cli.quiet.quiet_libraries", lambda: None)
    monkeypatch.setattr(sys, "argv", ["glm5"])
    with pytest.raises(SystemExit) as caught:
        process.run()
    return caught.value.code, capsys.readouterr().err


def test_the_command_line_prints_an_error_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for rank in (0, 1):
        ranks(rank)
        error = ConfigError("no such thing", got="this", expected="that")
        printed.append(command(error, monkeypatch, capsys))
    assert printed == [
        (2, "rank 0: error: no such thing\n  got:      this\n  expected: that\n"),
        (2, ""),
    ]


def test_who_waited_for_another_rank_points_to_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = RuntimeError("Connection closed by peer\nmore")
    ranks(0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        command(lost, monkeypatch, capsys)
    ranks(3)
    assert tells("bad")
    ranks(0)
    found = command(lost, monkeypatch, capsys)
    assert found == (1, "rank 0: stopped, see rank 3 (Connection closed by peer)\n")
