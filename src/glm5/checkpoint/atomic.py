"""Folders that appear complete or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5.errors import CheckpointError

_PARTIAL = ".partial-"


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A hidden sibling to write in; it becomes `folder` on success and is removed otherwise.

    A link is followed: the folder that it names appears.

    Raises:
        CheckpointError: `folder` exists and is not an empty folder, or cannot be where a file is.
    """
    # rename would not replace a link
    folder = Path(folder).resolve()
    check_is_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # a sibling, so that the final rename stays within one file system
    staging = _hidden_sibling(folder)
    staging.mkdir()
    try:
        yield staging
        _put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes it so that a kill in between leaves no half of it under its name."""
    going = _hidden_sibling(folder)
    folder.rename(going)
    shutil.rmtree(going)


def remove_partials(parent: Path) -> None:
    """Removes what killed processes left of their `new_folder`s; nobody may be writing there."""
    for path in parent.glob(f".*{_PARTIAL}*"):
        shutil.rmtree(path)


def _hidden_sibling(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_PARTIAL}{secrets.token_hex(4)}")


def _put_in_place(staging: Path, folder: Path) -> None:
    try:
        # rename replaces nothing but an empty folder
        staging.rename(folder)
    except OSError:
        # another process was faster
        check_is_free(folder)
        raise


def check_is_free(folder: Path) -> None:
    """Raise CheckpointError unless the folder is absent, and can be made, or empty."""
    above = next((path for path in folder.parents if path.exists()), None)
    if above is not None and not above.is_dir():
        raise CheckpointError(
            f"{folder} cannot be made",
            got=f"{above} is a file",
            expected="folders above it, or none yet",
            remedy="choose another folder",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} already exists and is not an empty folder",
            remedy="choose another folder, or remove this one first",
        )
