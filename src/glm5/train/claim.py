"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5.errors import ConfigError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process; the claim ends with the process, however it ends.

    Raises:
        ConfigError: another process trains into the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder, which appears only when there is something to keep
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "another process is training into the output folder",
                got=folder,
                remedy="wait for it, or choose another output.dir",
            ) from error
        yield
