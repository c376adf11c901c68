"""What Megatron-Bridge loads from, seen as our configuration and our reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource

from glm5.checkpoint.fp8 import Fp8DequantReader, open_checkpoint
from glm5.checkpoint.memory_reader import MemoryReader
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.config import Glm5Config
from glm5.errors import CheckpointError, ConfigError


def read_config(hf_pretrained: Any) -> Glm5Config:
    """The raw config.json where there is one: transformers' object of it has lost keys.

    `hf_pretrained` is Megatron-Bridge's wrapper of a folder or Hub repository, or a configuration
    object of transformers, of which all that is left is taken.

    Raises:
        ConfigError: it describes no supported model, or is of a revision that nobody looked up.
    """
    place = getattr(hf_pretrained, "model_name_or_path", None)
    if place is None:
        config = getattr(hf_pretrained, "config", hf_pretrained)
        return Glm5Config.from_hf_dict(config.to_dict())
    revision = getattr(hf_pretrained, "init_kwargs", {}).get("revision")
    if revision is not None and not Path(place).is_dir():
        raise ConfigError(
            "a revision of a Hub repository was asked for by its id",
            got=f"{place} at {revision}",
            expected="a local folder: Megatron-Bridge reads the weights of the default revision",
            remedy=f"hf download {place} --revision {revision}, and pass the folder",
        )
    return Glm5Config.from_hf(place)


def open_source(hf_pretrained: Any, glm5: Glm5Config) -> TensorReader:
    """A reader of the weights behind `hf_pretrained`, which hands out FP8 weights dequantised.

    Raises:
        CheckpointError: there are none, or files are missing or damaged.
    """
    state = getattr(hf_pretrained, "state", None)
    if state is None:
        raise CheckpointError(
            "there are no weights to load",
            got=type(hf_pretrained).__name__,
            expected="what AutoBridge.from_hf_pretrained opened",
            remedy="name the folder: load_hf_weights(model, hf_path)",
        )
    if isinstance(state.source, SafeTensorsStateSource):
        return open_checkpoint(state.source.path, glm5)
    reader = MemoryReader(state())
    return reader if glm5.fp8 is None else Fp8DequantReader(reader, glm5.fp8, _dtype(glm5))


def _dtype(glm5: Glm5Config) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, glm5.dtype)
    return dtype
