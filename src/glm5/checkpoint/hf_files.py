"""The small files of a Hugging Face folder: everything beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Glm5Config
from glm5.config_file import CONFIG_NAME

_TOKENIZER_PATTERNS = (
    "added_tokens.json",
    "chat_template*",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab.*",
)
_PATTERNS = (CONFIG_NAME, "generation_config.json", *_TOKENIZER_PATTERNS)


def small_files(folder: Path) -> Iterator[Path]:
    """config.json, generation config, tokenizer and chat templates: not the weights."""
    return _matching(folder, _PATTERNS)


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """What the tokens of a text depend on."""
    return _matching(folder, _TOKENIZER_PATTERNS)


def _matching(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (file for file in sorted(folder.glob(pattern)) if file.is_file())


def copy_small_files(source: Path, target: Path) -> None:
    """Copies them into the folder `target`, made when missing."""
    target.mkdir(exist_ok=True)
    for file in small_files(source):
        shutil.copyfile(file, target / file.name)


def add_small_files(writer: SafetensorsWriter, source: Path, glm5: Glm5Config) -> None:
    """Adds them to a folder that is being written, with the config.json of `glm5`."""
    for file in small_files(source):
        if file.name != CONFIG_NAME:
            writer.copy_file(file)
    writer.add_text(CONFIG_NAME, json.dumps(glm5.to_hf_dict(), indent=2) + "\n")
