"""Which safetensors files make up a Hugging Face folder, and which tensors the index lists."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NoReturn

from glm5.checkpoint.names import summarise
from glm5.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def shard_files(folder: Path) -> dict[Path, set[str] | None]:
    """The shards of a folder with the tensors its index lists for them, None without an index.

    Raises CheckpointError for a missing or damaged index, a missing shard, a shard outside the
    folder, and a folder that holds pickle files only.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists() and single.exists():
        raise CheckpointError(
            f"{folder} holds both {INDEX_FILE} and {SINGLE_FILE}",
            expected="one of them",
            remedy="remove the one that does not belong to this model",
        )
    if single.exists():
        _check_inside(single, folder)
        return {single: None}
    if not index.exists():
        _raise_no_weights(folder)
    files: dict[Path, set[str] | None] = {}
    for file_name, names in _read_index(index).items():
        file = folder / file_name
        _check_shard_name(index, file_name)
        if not file.exists():
            raise CheckpointError(
                f"shard {file} is missing",
                got=f"{len(names)} tensors listed in it by {INDEX_FILE}",
                remedy="download or copy the folder again, with all shards",
            )
        _check_inside(file, folder)
        files[file] = names
    return files


def _raise_no_weights(folder: Path) -> NoReturn:
    if not folder.is_dir():
        raise CheckpointError(f"no folder {folder}", remedy="give a Hugging Face model folder")
    pickled = sorted(
        path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"}
    )
    raise CheckpointError(
        f"no safetensors weights in {folder}",
        got=f"pickle files, which are never loaded: {', '.join(pickled)}" if pickled else None,
        expected=f"{INDEX_FILE} with its shards, or {SINGLE_FILE}",
        remedy="save the model as safetensors (transformers' save_pretrained does)",
    )


def _read_index(index: Path) -> dict[str, set[str]]:
    """The tensors listed for each shard."""
    try:
        content = json.loads(index.read_text("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{index} is not readable JSON", got=error, remedy="download or copy it again"
        ) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(
            f"{index} has no usable weight_map",
            got=type(content).__name__ if weight_map is None else f"weight_map {weight_map!r:.80}",
            expected='{"weight_map": {tensor name: file name}}',
            remedy="download or copy it again",
        )
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, set()).add(name)
    return files


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = [key for key, count in counts.items() if count > 1]
        raise ValueError(f"repeated keys: {summarise(repeated)}")
    return content


def _check_shard_name(index: Path, file: str) -> None:
    # A plain name on either system's rules: no folder, no drive, no "..".
    plain = Path(file).name == file and "\\" not in file and ":" not in file
    if not plain or not file.endswith(".safetensors"):
        raise CheckpointError(
            f"{index} names a shard that it must not",
            got=repr(file),
            expected="a plain *.safetensors file name in the same folder",
            remedy="do not use this index; download the folder again from a trusted place",
        )


def _check_inside(file: Path, folder: Path) -> None:
    """Follow links: a shard lies in the folder, or in the blobs of the Hub cache around it."""
    target, root = file.resolve(), folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"shard {file} is a link out of its folder",
            got=target,
            expected=f"a file in {root}",
            remedy="copy the file into the folder, or give the folder that holds it",
        )
