"""Runs a function in several gloo processes; the libraries are imported once, each one forks."""

import multiprocessing
import multiprocessing.forkserver
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300
PRELOADED = ["glm5.train.run", "glm5.export.restore", "tests.parallel.jobs"]
_FORKS = multiprocessing.get_context("forkserver")


def run_ranks(
    folder: Path,
    count: int,
    work: Callable[..., Any],
    *args: Any,
    dying_rank: int | None = None,
    preload: Sequence[str] = PRELOADED,
) -> list[Any]:
    """What work(*args) returned in each of `count` processes, as torchrun would start them.

    Results are what torch.load(weights_only=True) reads: tensors, numbers, strings, containers. An
    error in one process, or one that hangs, fails the test with its traceback; `dying_rank` is
    meant to end early or to hang, and has no result. The first call says what all import.
    """
    _prepare(preload)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": "test",
    }
    processes = [
        _FORKS.Process(target=_main, args=(rank, environment, folder, work, args), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    others = [rank for rank in range(count) if rank != dying_rank]
    try:
        _wait([processes[rank] for rank in others], folder)
    finally:
        if dying_rank is not None:
            processes[dying_rank].kill()
            processes[dying_rank].join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in others]


def _wait(processes: list[Any], folder: Path) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        # the others would wait for a dead rank in a collective
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.02)
    for process in processes:
        process.join(1)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hung:
        processes[rank].kill()
        processes[rank].join()
    if hung or any(process.exitcode for process in processes):
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        pytest.fail("\n".join([f"ranks that did not end: {hung}", *errors]))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _prepare(preload: Sequence[str]) -> None:
    # the fork server takes its path from the environment when it starts
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        _FORKS.set_forkserver_preload(list(preload))
        multiprocessing.forkserver.ensure_running()


def _main(
    rank: int, environment: dict[str, str], folder: Path, work: Callable[..., Any], args: Any
) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        torch.save(work(*args), folder / f"{rank}.pt")
        from glm5.runtime.distributed import shut_down

        shut_down()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}\n{traceback.format_exc()}")
        # no tidy end: the other ranks may never come to meet this one
        os._exit(1)
    os._exit(0)
