"""Loads a checkpoint as `transformers` does, where it computes the same model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from glm5.config import Glm5Config
from glm5.errors import CheckpointError, ConfigError

# Older releases rotate the indexer or the attention differently, or attend to the future.
MIN_TRANSFORMERS = Version("5.13")


def load_hf_model(folder: str | Path, glm5: Glm5Config, dtype: torch.dtype = torch.float32) -> Any:
    """The `transformers` causal model of a local folder, eager, in evaluation mode.

    In `dtype`, but for what transformers itself keeps in fp32: the routers. It expands the schedule
    from the raw config by itself; only keys that some of its releases write and others misread are
    left out. It hard-wires the latent norms' eps, so that one is set. Weights come from safetensors
    only.

    Raises:
        ConfigError: this transformers is too old to be an oracle, or cannot express the model.
        CheckpointError: it does not load the folder.
    """
    _check_oracle(glm5)
    from transformers import AutoModelForCausalLM

    config = _hf_config(glm5)
    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                # the grouped product takes only rows of a multiple of 16 bytes
                experts_implementation="eager",
                use_safetensors=True,
            )
    # whatever it raises, the folder is what it could not take
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot load {folder}",
            got=_first_line(error),
            expected="a folder that AutoModelForCausalLM loads",
            remedy="look at what transformers says; glm5 itself has not been judged",
        ) from error
    set_latent_eps(model, glm5.latent_norm_eps)
    return model.eval()


def set_latent_eps(model: Any, eps: float) -> None:
    """Of the q and kv latent norms of a `transformers` causal model, which hard-wires 1e-6."""
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = eps


def _check_oracle(glm5: Glm5Config) -> None:
    import transformers

    if Version(transformers.__version__) < MIN_TRANSFORMERS:
        raise ConfigError(
            "this transformers computes GLM-5 wrongly",
            got=transformers.__version__,
            expected=f">= {MIN_TRANSFORMERS}",
            remedy="upgrade transformers",
        )
    if not glm5.indexer_rope_interleave:
        raise ConfigError(
            "transformers cannot express this model",
            got="indexer_rope_interleave = false",
            expected="true, which it hard-wires",
            remedy="a comparison with transformers is not possible for this checkpoint",
        )


def _hf_config(glm5: Glm5Config) -> Any:
    from transformers import GlmMoeDsaConfig

    try:
        return GlmMoeDsaConfig(**glm5.model_copy(update={"fp8": None}).to_hf_dict())
    # its validation has exceptions of its own, which differ between releases
    except Exception as error:
        raise ConfigError(
            "transformers refuses this config.json",
            got=_first_line(error),
            expected="values that GlmMoeDsaConfig takes",
            remedy="use the model's own config.json",
        ) from error


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, and no report that the MTP layer, which it never builds, is unexpected."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
