"""`glm5 verify`: 0 the same model, 1 another one, 2 nothing to compare."""

from pathlib import Path
from typing import Any

import pytest

from glm5.parity.hf_side import load_reference
from tests.cli.conftest import Glm5
from tests.hf_folders import rewrite, set_config
from tests.tiny_models import TinyFolder


def test_a_good_checkpoint(glm5: Glm5, tiny_folder: TinyFolder) -> None:
    result = glm5("verify", tiny_folder("5"), "--json")
    assert result.exit_code == 0
    assert result.json["ok"] is True
    assert {"logits", "gradients"} <= {found["quantity"] for found in result.json["findings"]}


def test_another_model(
    glm5: Glm5, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(*args: Any) -> Any:
        model = load_reference(*args)
        model.model.layers[1].self_attn.o_proj.weight.data[0, 0] += 0.1
        return model

    monkeypatch.setattr("glm5.cli.verify.load_reference", disturbed)
    result = glm5("verify", tiny_folder("5"))
    assert result.exit_code == 1
    assert "FAILED" in result.out and "verdict: NOT the same model" in result.out
    result = glm5("verify", tiny_folder("5"), "--json")
    assert result.exit_code == 1 and result.json["ok"] is False


def test_nothing_to_compare(glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    result = glm5("verify", tmp_path / "none", "--json")
    assert result.exit_code == 2 and result.out == "" and "no such checkpoint" in result.err
    assert glm5("verify", tmp_path).exit_code == 2
    folder = rewrite(tiny_folder("5"), tmp_path / "hf", lambda tensors: None)
    set_config(folder, vocab_size=300)
    result = glm5("verify", folder)
    assert result.exit_code == 2 and "wrong shape" in result.err


def test_an_fp8_checkpoint_is_verified_as_it_is(glm5: Glm5, tiny_folder: TinyFolder) -> None:
    def cases(*arguments: object) -> set[str]:
        result = glm5("verify", *arguments, "--json")
        assert result.exit_code == 0 and result.json["ok"] is True
        return {found["case"] for found in result.json["findings"]}

    told = {"fp8_compute", "fp8_compute, same choices"}
    fp8, plain = tiny_folder("5", fp8=True, dtype="bfloat16"), tiny_folder("5")
    assert told < cases(fp8)
    assert told < cases(plain, "--base-weights", "fp8")
    assert not told & cases(fp8, "--base-weights", "dtype")
    result = glm5("verify", fp8)
    assert "told" in result.out and "verdict: the same model" in result.out
    assert glm5("verify", fp8, "--base-weights", "int4").exit_code == 2
