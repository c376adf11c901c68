"""Runs the command line in processes of its own; Megatron-Core is imported once, each one forks."""

import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120
PRELOADED = ["glm5.cli.train", "transformers.models.auto.tokenization_auto"]
_FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Command:
    """A `glm5 ...` that was started; what it prints goes to files."""

    process: BaseProcess
    output: Path
    errors: Path

    def send(self, signal: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal)

    def exit_code(self) -> int:
        """Waits for the end; a process that hangs fails the test."""
        self.process.join(TIMEOUT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            pytest.fail(f"did not end:\n{self.errors.read_text()}")
        return self.process.exitcode

    def stdout(self) -> str:
        return self.output.read_text()

    def stderr(self) -> str:
        return self.errors.read_text()


def start(folder: Path, *args: object, **environment: str) -> Command:
    """Starts `glm5 args...`; its output goes to new files in `folder`."""
    _prepare()
    number = len(list(folder.glob("*.stdout")))
    output, errors = folder / f"{number}.stdout", folder / f"{number}.stderr"
    output.touch()
    words = [str(word) for word in args]
    process = _FORKS.Process(target=_main, args=(words, output, errors, environment))
    process.start()
    return Command(process, output, errors)


def run(folder: Path, *args: object, **environment: str) -> Command:
    """The same, after its end; the exit code must be 0."""
    command = start(folder, *args, **environment)
    assert command.exit_code() == 0, command.stderr()
    return command


def run_ranks(folder: Path, count: int, *args: object) -> list[Command]:
    """`count` processes as torchrun starts them, after their end; all exit codes must be 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["TORCHELASTIC_RUN_ID"] = "test"
    commands = [
        start(folder, *args, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(count)
    ]
    codes = [command.exit_code() for command in commands]
    assert codes == [0] * count, "\n".join(command.stderr() for command in commands)
    return commands


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls; a condition that never comes fails the test."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def _prepare() -> None:
    # the fork server takes its path from the environment when it starts
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        _FORKS.set_forkserver_preload(PRELOADED)
        multiprocessing.forkserver.ensure_running()


def _main(words: list[str], output: Path, errors: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["glm5", *words]
    from glm5.cli import main

    main()
