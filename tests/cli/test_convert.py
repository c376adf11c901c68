"""`glm5 convert`, and `glm5 export` of what it made."""

from pathlib import Path

import pytest
from torch import Tensor

from glm5.checkpoint.convert import hf_weights
from glm5.export import hf as hf_module
from tests.cli.conftest import Glm5
from tests.hf_folders import rewrite
from tests.tiny_models import TinyFolder

O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def test_there_and_back(glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    result = glm5("convert", tiny_folder("5"), tmp_path / "ckpt", "--json")
    assert result.exit_code == 0
    assert result.json == {
        "checkpoint": str(tmp_path / "ckpt"),
        "dtype": "float32",
        "include_mtp": True,
    }
    result = glm5("convert", tiny_folder("5"), tmp_path / "ckpt", "--json")
    assert result.exit_code == 2 and "not an empty folder" in result.err
    result = glm5("export", tmp_path / "ckpt", tmp_path / "out", "--as", "hf", "--json")
    assert result.exit_code == 0
    assert result.json["as"] == "hf" and all(check["ok"] for check in result.json["checks"])
    result = glm5("export", tmp_path / "ckpt", tmp_path / "out", "--as", "hf")
    assert result.exit_code == 2 and "not an empty folder" in result.err
    result = glm5("export", tmp_path / "ckpt", tmp_path / "no", "--as", "merged", "--json")
    assert result.exit_code == 2 and result.out == "" and "--as hf" in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt", "out"}


def test_an_export_that_computes_something_else_is_1(
    glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert glm5("convert", tiny_folder("5"), tmp_path / "ckpt").exit_code == 0

    def wrong(*args: object) -> object:
        return ((name, 1.01 * tensor) for name, tensor in hf_weights(*args))  # type: ignore

    monkeypatch.setattr(hf_module, "hf_weights", wrong)
    result = glm5("export", tmp_path / "ckpt", tmp_path / "out", "--as", "hf")
    assert result.exit_code == 1 and "other logits" in result.err
    assert not (tmp_path / "out").exists()


def test_a_bad_source_is_named(glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[O_PROJ]

    source = rewrite(tiny_folder("5"), tmp_path / "hf", drop)
    result = glm5("convert", source, tmp_path / "ckpt")
    assert result.exit_code == 2 and O_PROJ in result.err
    assert not (tmp_path / "ckpt").exists()
