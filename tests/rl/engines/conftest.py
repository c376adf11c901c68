"""A tiny checkpoint, adapters of it, and prompts, for the engines' tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm5.config import Glm5Config
from tests.adapters import KINDS, make_factors, write
from tests.tiny_models import TinyFolder, tiny_folder

__all__ = ["tiny_folder"]

MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tiny_folder: TinyFolder) -> Path:
    """A tiny GLM-5.2: full and shared indexer layers, dense and sparse ones, index_topk 8."""
    return tiny_folder("5.2")


@pytest.fixture(scope="session")
def glm5(folder: Path) -> Glm5Config:
    return Glm5Config.from_hf(folder)


@pytest.fixture(scope="session")
def make_adapter(glm5: Glm5Config, tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """make_adapter(seed, kind of linears = "all") -> a PEFT folder, b not zero."""
    made: dict[tuple[int, str], Path] = {}

    def adapter(seed: int, kind: str = "all") -> Path:
        key = (seed, kind)
        if key not in made:
            torch.manual_seed(seed)
            made[key] = tmp_path_factory.mktemp("adapter") / f"{kind}-{seed}"
            write(made[key], make_factors(glm5, KINDS[kind]), glm5)
        return made[key]

    return adapter
