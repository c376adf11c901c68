"""What is said of how both sides multiply, and how a server's model is looked at."""

from pathlib import Path
from typing import Any, get_args

import pytest

from glm5.rl.products import Products, describe_products, product_labels, serves_fp8
from tests.tiny_models import TinyFolder


@pytest.mark.parametrize("trainer", ["exact", "fp8"])
@pytest.mark.parametrize("engine", get_args(Products))
def test_sides_that_differ_get_a_remedy(trainer: Products, engine: Products) -> None:
    line = describe_products(trainer, engine)
    assert line.startswith(f"products of linears: {trainer} in the trainer, {engine} in the engine")
    assert (": " in line.removeprefix("products of linears: ")) == (trainer != engine)
    assert product_labels(trainer, engine) == {
        "gap_trainer_products": trainer,
        "gap_engine_products": engine,
    }


def test_a_folder_tells(tiny_folder: TinyFolder) -> None:
    assert serves_fp8(str(tiny_folder("5", fp8=True))) is True
    assert serves_fp8(str(tiny_folder("5"))) is False


def test_a_downloaded_repository_tells(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(repo: str, file: str) -> Any:
        return str(tiny_folder("5", fp8=True) / file) if repo == "zai-org/GLM-5.3" else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert serves_fp8("zai-org/GLM-5.3") is True
    assert serves_fp8("zai-org/GLM-5.2") is None


@pytest.mark.parametrize("model", [None, 7, "", "/no/such/folder/of/a/server", "a b c"])
def test_what_cannot_be_seen_from_here(model: object) -> None:
    assert serves_fp8(model) is None


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert serves_fp8(str(tmp_path)) is None
