"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from glm5.errors import ConfigError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process; the claim ends with the process, however it ends.

    Raises:
        ConfigError: another process trains into the folder, or it is a file.
    """
    if not folder.name or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            "the output folder is none",
            got=folder,
            expected="a new folder, or that of an earlier run",
            remedy="choose another output.dir",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder, which appears only when there is something to keep
    path = folder.with_name(f".{folder.name}.lock")
    with _locked(path, folder) as file:
        try:
            yield
        finally:
            # under the lock, so that nobody else can hold what is removed
            if _is_at(path, file):
                path.unlink()


def _locked(path: Path, folder: Path) -> IO[str]:
    """The file at `path`, open and locked.

    Its last holder removes it. Who opened it before that and locks it afterwards holds a file that
    nobody else can find: only a lock on what is still at `path` is a claim.
    """
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(
                "another process is training into the output folder",
                got=folder,
                remedy="wait for it, or choose another output.dir",
            ) from error
        if _is_at(path, file):
            return file
        file.close()


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
