import shutil
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.fingerprint import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    base_fingerprints,
    changed_inputs,
    files_fingerprint,
)
from tests.hf_folders import rewrite
from tests.tiny_models import TinyFolder


def test_a_copy_is_the_same(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder("5"), tmp_path / "copy")
    assert base_fingerprints(copy) == base_fingerprints(tiny_folder("5"))


def test_one_scaled_tensor_is_found(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"].mul_(1.5)

    # rewritten in both cases, since a writer may cut shards elsewhere
    same = base_fingerprints(rewrite(tiny_folder("5"), tmp_path / "same", lambda tensors: None))
    scaled = base_fingerprints(rewrite(tiny_folder("5"), tmp_path / "scaled", scale))
    assert changed_inputs(same, scaled) == [WEIGHTS]
    assert changed_inputs(same, same) == []


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
