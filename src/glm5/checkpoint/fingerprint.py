"""Tells whether the files that a run was started from are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from glm5.checkpoint.hf_files import small_files
from glm5.config_file import CONFIG_NAME

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 2**20

WEIGHTS, CONFIG, TOKENIZER = "base weights", "config.json", "tokenizer and chat template"


def base_fingerprints(hf_dir: Path) -> dict[str, str]:
    """Of a Hugging Face folder: its weights, its config.json, and its other small files.

    Weights are sampled: their size and 64 evenly spaced pieces of 4 KiB of every file, which tells
    another release or another training from this one without reading a terabyte.
    """
    others = [
        file
        for file in small_files(hf_dir)
        if file.name not in (CONFIG_NAME, "generation_config.json")
    ]
    return {
        WEIGHTS: _digest(map(_sample, sorted(hf_dir.glob("*.safetensors")))),
        CONFIG: files_fingerprint([hf_dir / CONFIG_NAME]),
        TOKENIZER: files_fingerprint(others),
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
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name} {size}".encode())
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    with file.open("rb") as stream:
        for start in range(0, size, step):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
