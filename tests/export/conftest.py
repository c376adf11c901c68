"""Checkpoints to export, each trained once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.train.run import train
from tests.tiny_models import TinyFolder, tiny_folder
from tests.training import run_config

__all__ = ["tiny_folder"]

TrainedRun = Callable[..., Path]
# Few steps at a rate that moves the logits far more than rounding does.
OPTIMIZER = {"lr": 3e-2, "schedule": "constant"}


@pytest.fixture(scope="session")
def trained_run(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """trained_run(variant, folder_options, **sections) -> the folder of a run of two steps."""
    made: dict[str, Path] = {}

    def trained(variant: str, options: dict[str, Any], **sections: Any) -> Path:
        key = repr((variant, options, sections))
        if key not in made:
            out = tmp_path_factory.mktemp("trained") / "run"
            folder = tiny_folder(variant, **options)
            chosen = {"optimizer": OPTIMIZER, "train": {"steps": 2}} | sections
            train(run_config(folder, out, **chosen), quiet=True)
            made[key] = out
        return made[key]

    return trained
