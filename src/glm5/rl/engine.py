"""The engine that a run names."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.model.transformer_config import torch_dtype
from glm5.rl.engines.hf import HfEngine
from glm5.rl.engines.http import HttpOptions
from glm5.rl.engines.openai import OpenAiEngine
from glm5.rl.engines.sglang import SglangEngine
from glm5.rl.products import Products
from glm5.rl.rollout import Engine
from glm5.rl.run_config import RlConfig
from glm5.rl.sections import RolloutSection


def build_engine(run: RlConfig, folder: Path, glm5: Glm5Config, device: torch.device) -> Engine:
    """The engine of `[rollout]`, on the base in `folder`; a server is asked whether it can do what
    the run will want of it.

    Raises:
        EngineError: the server does not answer, or lacks something. ConfigError: float8 is asked of
        a checkpoint that has none.
    """
    section = run.rollout
    if section.engine == "hf":
        dtype = torch_dtype(section.dtype or run.model.dtype)
        options = {} if section.max_batch is None else {"max_batch": section.max_batch}
        fp8 = bool(section.fp8_activations)
        return HfEngine(
            folder,
            glm5,
            device,
            dtype,
            base_weights=run.model.base_weights,
            fp8_activations=fp8,
            **options,
        )
    assert section.url is not None
    if section.engine == "sglang":
        return SglangEngine(
            section.url,
            glm5,
            record=run.rl.replay,
            lora=run.lora is not None,
            options=_http_options(section),
        )
    assert section.model is not None
    return OpenAiEngine(
        section.url,
        section.model,
        glm5,
        log_probs=section.log_probs or "raw",
        options=_http_options(section),
    )


def check_records(run: RlConfig, engine: Engine) -> None:
    """Before anything is sampled.

    Raises:
        ConfigError: the engine cannot record what is replayed.
    """
    if run.rl.replay != "none" and not engine.can_record:
        raise ConfigError(
            "the engine does not record its choices",
            got=f"rl.replay = {run.rl.replay!r} with {type(engine).__name__}",
            remedy="set rl.replay = 'none'",
        )


def trainer_products(run: RlConfig) -> Products:
    """How the trainer multiplies linears."""
    return "fp8" if run.model.fp8_compute else "exact"


def describe_quantised_base(run: RlConfig, glm5: Glm5Config) -> str | None:
    """A line for the start of a run whose server has to be given the trainer's weights."""
    if run.rollout.engine == "hf" or run.model.base_weights == "dtype" or glm5.fp8 is not None:
        return None
    return (
        f"the trainer quantises {run.model.path}: unless the server serves weights that are "
        "quantised alike, what that changes is in the gap (docs/rl.md)"
    )


def _http_options(section: RolloutSection) -> HttpOptions:
    names = ("connect_timeout_s", "read_timeout_s", "max_attempts", "num_in_flight")
    given = {name: getattr(section, name) for name in names}
    return HttpOptions(**{name: value for name, value in given.items() if value is not None})


def engine_latent_norm_eps(run: RlConfig, glm5: Glm5Config) -> float:
    """Epsilon of the q and kv latent norms in the engine, which the trainer must share.

    Servers compute them with the model's rms_norm_eps; `transformers`, which hard-wires another
    one, is set to the trainer's.

    Raises:
        ConfigError: the run says another one for the trainer.
    """
    given = run.rollout.latent_norm_eps
    ours = run.model.latent_norm_eps
    if run.rollout.engine == "hf":
        return given or ours or glm5.latent_norm_eps
    theirs = given or glm5.rms_norm_eps
    if ours is not None and ours != theirs:
        raise ConfigError(
            "engine and trainer would norm latents differently",
            got=f"model.latent_norm_eps = {ours}",
            expected=f"{theirs}, as {run.rollout.engine} has it",
            remedy="leave model.latent_norm_eps out; if the server really has another one, say so "
            "in rollout.latent_norm_eps",
        )
    return theirs
