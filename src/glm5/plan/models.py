"""Finds the configuration of a model to plan for: a folder, a config.json, or a published name."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from glm5.config import Glm5Config
from glm5.config_file import read_config_file

ORGANISATION = "zai-org"
FP8_SUFFIX = "-FP8"
# 5 and 5.1, 5.2 and 5.3 share an architecture; the published files are part of this package.
_FILES = {"glm-5": "glm5", "glm-5.1": "glm5", "glm-5.2": "glm52", "glm-5.3": "glm52"}
_SPELLED = ("GLM-5", "GLM-5.1", "GLM-5.2", "GLM-5.3")
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def read_model(model: str) -> tuple[str, Glm5Config]:
    """(what a run file may name the model by, its configuration).

    `model` is a Hugging Face folder, a config.json, a published name such as GLM-5.2 or
    zai-org/GLM-5.2-FP8, or any other Hub repository.

    Raises:
        ConfigError: there is no such model, or it is not of the family.
    """
    path = Path(model)
    if path.is_file():
        return str(path.absolute().parent), Glm5Config.from_hf_dict(read_config_file(path))
    if path.is_dir():
        return str(path.absolute()), Glm5Config.from_hf(path)
    repo = published_name(model)
    if repo is None:
        return model, Glm5Config.from_hf(model)
    return f"{ORGANISATION}/{repo}", Glm5Config.from_hf_dict(_published(repo))


def published_name(model: str) -> str | None:
    """The spelling of a published name, given in any case and with or without its organisation."""
    plain = model.lower().removeprefix(f"{ORGANISATION}/")
    fp8 = plain.endswith(FP8_SUFFIX.lower())
    plain = plain.removesuffix(FP8_SUFFIX.lower())
    for name in _SPELLED:
        if plain == name.lower():
            return name + FP8_SUFFIX if fp8 else name
    return None


def _published(repo: str) -> dict[str, Any]:
    plain = repo.removesuffix(FP8_SUFFIX)
    text = (files("glm5") / "configs" / f"{_FILES[plain.lower()]}.json").read_text("utf-8")
    raw: dict[str, Any] = json.loads(text)
    # from 5.3 on the plain name is the FP8 release
    if repo.endswith(FP8_SUFFIX) or plain == "GLM-5.3":
        raw["quantization_config"] = _FP8
    return raw
