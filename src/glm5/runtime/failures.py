"""Which of several processes tells an error, so that each is told once.

Processes that a launcher started share its key-value store. Nothing here waits for long: a store
that does not answer counts as none, and then a process tells what it knows.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

DEFAULT_TIMEOUT_MINUTES = 30.0
# So long the other ranks wait for rank 0 to tell the same error, or for another to tell its own.
WAIT_SECONDS = 3.0
_ANSWER_SECONDS = 10.0


def rank_of_many() -> int | None:
    """This process's rank where a launcher started several, else None."""
    # torch's launcher sets all three; asking torch would import it for every error
    launched = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    return int(os.environ["RANK"]) if launched else None


def tells(text: str) -> bool:
    """Whether this process is the one that tells its own error `text`.

    A process alone and rank 0 always are. Of others with the same text one is, and only where rank
    0 has not told it.
    """
    rank = rank_of_many()
    if rank is None:
        return True
    return _within(_ANSWER_SECONDS, lambda: _claims(_store(), rank, text), otherwise=True)


def told_by() -> int | None:
    """The rank that was the first to have an error of its own, if another one was."""
    rank = rank_of_many()
    if rank is None:
        return None
    return _within(_ANSWER_SECONDS, lambda: _first_of_others(_store(), rank), otherwise=None)


def _claims(store: Store, rank: int, text: str) -> bool:
    told = f"{_PREFIX}{_restart()}/{hashlib.sha256(text.encode()).hexdigest()}"
    store.compare_set(_first(), "", str(rank))
    if rank == 0:
        store.add(told, 1)
        return True
    _is_there(store, told)
    return store.add(told, 1) == 1


def _first_of_others(store: Store, rank: int) -> int | None:
    if not _is_there(store, _first()):
        return None
    found = int(store.get(_first()))
    return None if found == rank else found


_PREFIX = "glm5/failures/"


def _first() -> str:
    return f"{_PREFIX}{_restart()}/first"


def _restart() -> str:
    """A launcher's store outlives the processes that it starts again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _is_there(store: Store, key: str) -> bool:
    """Whether the key is there, or comes within WAIT_SECONDS."""
    end = time.monotonic() + WAIT_SECONDS
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _store() -> Store:
    """A connection of its own: that of the process group may be in the middle of something."""
    from torch.distributed import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )


def _within[T](seconds: float, ask: Callable[[], T], *, otherwise: T) -> T:
    """What `ask` finds, or `otherwise` where it fails or does not answer in time."""
    from torch.distributed import DistError

    answers: list[T] = []

    def run() -> None:
        # a store that went away is no error of the user's
        try:
            answers.append(ask())
        except DistError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise
