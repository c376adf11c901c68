"""Tells whether the files that a run was started from are still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from glm5.checkpoint.hf_files import tokenizer_files
from glm5.config_file import CONFIG_NAME
from glm5.errors import CheckpointError

# Of every tensor: all of it when it is small, else this many evenly spaced pieces.
_PIECES = 4
_PIECE_BYTES = 4096
_CHUNK_BYTES = 2**20

WEIGHTS, CONFIG, TOKENIZER = "base weights", "config.json", "tokenizer and chat template"


def base_fingerprints(hf_dir: Path) -> dict[str, str]:
    """Of a Hugging Face folder: its weights, its config.json, and its tokenizer's files.

    Of every weight the name, dtype, shape and samples count, 16 KiB of a large one: a tensor that
    changed as a whole is found without reading a terabyte.

    Raises:
        CheckpointError: a weight file is damaged.
    """
    return {
        WEIGHTS: _digest(map(_sample, sorted(hf_dir.glob("*.safetensors")))),
        CONFIG: files_fingerprint([hf_dir / CONFIG_NAME]),
        TOKENIZER: files_fingerprint(tokenizer_files(hf_dir)),
    }


def files_fingerprint(files: Iterable[Path]) -> str:
    """Of the whole contents of some files, in order."""
    return _digest(map(_whole, files))


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of what differs, of those that `now` knows."""
    return [name for name in now if before.get(name) != now[name]]


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _whole(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _sample(file: Path) -> bytes:
    digest = hashlib.sha256(file.name.encode())
    with file.open("rb") as stream:
        header, data_start = _read_header(stream, file)
        digest.update(header)
        for start, end in _spans(header, file):
            for offset in _offsets(end - start):
                stream.seek(data_start + start + offset)
                digest.update(stream.read(min(_PIECE_BYTES, end - start - offset)))
    return digest.digest()


def _offsets(size: int) -> Iterable[int]:
    """Where pieces of a tensor of so many bytes start: its first and its last bytes are read."""
    if size <= _PIECES * _PIECE_BYTES:
        return range(0, size, _PIECE_BYTES)
    last = size - _PIECE_BYTES
    return [last * piece // (_PIECES - 1) for piece in range(_PIECES)]


def _read_header(stream: BinaryIO, file: Path) -> tuple[bytes, int]:
    """The JSON of a safetensors file, and where its values start."""
    size = int.from_bytes(stream.read(8), "little")
    if size > file.stat().st_size:
        raise _damaged(file)
    return stream.read(size), 8 + size


def _spans(header: bytes, file: Path) -> list[tuple[int, int]]:
    """First and last byte of every tensor, in the order of the file."""
    try:
        entries = json.loads(header)
        return sorted(
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _damaged(file) from error


def _damaged(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} is no safetensors file", remedy="download or copy it again")
