import json
import shutil
from pathlib import Path

import pytest

from glm5.checkpoint.fingerprint import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    _offsets,
    base_fingerprints,
    changed_inputs,
    files_fingerprint,
)
from glm5.errors import CheckpointError
from tests.tiny_models import TinyFolder


def test_a_copy_is_the_same(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder("5"), tmp_path / "copy")
    assert base_fingerprints(copy) == base_fingerprints(tiny_folder("5"))


def test_every_tensor_that_changes_as_a_whole_is_found(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_folder("5"), tmp_path / "copy"))
    before = base_fingerprints(copy)
    shard = max(copy.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = shard.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    tensors.pop("__metadata__", None)
    assert len(tensors) > 20
    for name, entry in tensors.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        flipped = bytes(byte ^ 1 for byte in content[first:last])
        shard.write_bytes(content[:first] + flipped + content[last:])
        assert changed_inputs(before, base_fingerprints(copy)) == [WEIGHTS], name
    shard.write_bytes(content)
    assert base_fingerprints(copy) == before


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 10**6])
def test_samples_reach_from_the_first_byte_to_the_last(size: int) -> None:
    starts = list(_offsets(size))
    read = {start + i for start in starts for i in range(4096) if start + i < size}
    assert len(read) == min(size, 16384)
    assert size == 0 or {0, size - 1} <= read


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02" + bytes(7) + b"[]"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file"):
        base_fingerprints(tmp_path)


def test_files_of_no_use_do_not_count(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_folder("5"), tmp_path / "copy"))
    (copy / "notes.txt").write_text("x")
    (copy / "adapter_config.json").write_text("{}")
    assert base_fingerprints(copy) == base_fingerprints(tiny_folder("5"))


@pytest.mark.parametrize(
    ("file", "name"),
    [("config.json", CONFIG), ("chat_template.jinja", TOKENIZER), ("tokenizer.json", TOKENIZER)],
)
def test_small_files_are_found(
    tiny_folder: TinyFolder, tmp_path: Path, file: str, name: str
) -> None:
    copy = shutil.copytree(tiny_folder("5"), tmp_path / "copy")
    with (copy / file).open("a") as stream:
        stream.write(" ")
    now = base_fingerprints(copy)
    assert changed_inputs(base_fingerprints(tiny_folder("5")), now) == [name]


def test_whole_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(3 * 2**20))
    before = files_fingerprint([file])
    with file.open("r+b") as stream:
        stream.seek(2**20 + 5)
        stream.write(b"x")
    assert files_fingerprint([file]) != before
    assert files_fingerprint([]) != before
