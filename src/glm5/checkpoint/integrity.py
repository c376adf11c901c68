"""The SHA-256 of every file of a Megatron checkpoint: written by a save, compared before a load.

In the form that Megatron-Core writes since 0.17, so that either reads what the other wrote.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch.distributed as dist

MANIFEST = "integrity.json"
_ALGORITHM = "sha256"


def write_manifest(folder: Path) -> None:
    """Hashes every file of the folder; one process does, when all have written."""
    files = {
        path.name: _hash(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    text = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def changed_files(folder: Path) -> list[str]:
    """What is wrong with which file, empty where all are as they were saved; collective.

    The first rank reads them all.

    Raises:
        OSError, ValueError, KeyError, TypeError: the manifest cannot be read; on every rank.
    """
    files = _hashes(folder)
    told = [_changed(folder, files) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(told)
    return told[0]


def damaged_files(folder: Path) -> list[str]:
    """The same by one process, of the files that the manifest lists: a trainer may add others.

    Raises:
        OSError, ValueError, KeyError, TypeError: the manifest cannot be read.
    """
    return _damaged(folder, _hashes(folder))


def _hashes(folder: Path) -> dict[str, str]:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    files = dict(manifest["files"])
    if manifest["algorithm"] != _ALGORITHM:
        raise ValueError(f"hashes of {manifest['algorithm']}, not of {_ALGORITHM}")
    return files


def _changed(folder: Path, files: dict[str, str]) -> list[str]:
    there = {path.name for path in folder.iterdir() if path.is_file()} - {MANIFEST}
    added = [f"{name}: not among the files saved" for name in sorted(there - files.keys())]
    return added + _damaged(folder, files)


def _damaged(folder: Path, files: dict[str, str]) -> list[str]:
    there = {name for name in files if (folder / name).is_file()}
    found = [f"{name}: file missing" for name in sorted(files.keys() - there)]
    for name in sorted(there):
        try:
            actual = _hash(folder / name)
        except OSError as error:
            found.append(f"{name}: unreadable ({error})")
            continue
        if actual != files[name]:
            found.append(f"{name}: hash mismatch (expected {files[name]}, got {actual})")
    return found


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()
