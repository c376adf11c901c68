"""From a Hugging Face folder to a Megatron-Core model with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.convert import load_hf_weights
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.glm5_rules import glm5_rules, mtp_hf_names
from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.hf_layout import check_hf_tensors
from glm5.config import Glm5Config
from glm5.errors import CheckpointError, ConfigError
from glm5.model.build import build_model
from glm5.model.transformer_config import Recompute, glm5_transformer_config, torch_dtype
from glm5.ops.backends import default_backend
from glm5.runtime.distributed import (
    checked_device,
    current_layout,
    default_device,
    ensure_distributed,
)


def load_model(
    hf_dir: str | Path,
    *,
    backend: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    recompute: Recompute = "none",
    include_mtp: bool = False,
    indexer_loss_coeff: float = 0.0,
    deterministic_attention: bool = False,
    latent_norm_eps: float | None = None,
    layers_per_stage: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> GPTModel:
    """The model of a Hugging Face checkpoint, in evaluation mode, with every tensor checked.

    Starts a process group and Megatron's parallel state of one process unless they exist. `backend`
    defaults to the device's, `dtype` ("float32", "bfloat16") to the checkpoint's, `device` to the
    GPU where there is one. FP8 weights are dequantised. In the checkpoint's dtype nothing is
    rounded.

    Raises:
        ConfigError, CheckpointError, BackendError, LayoutError: see what each says.
    """
    folder = hf_folder(hf_dir)
    glm5 = Glm5Config.from_hf(folder)
    if latent_norm_eps is not None:
        if not (latent_norm_eps > 0 and math.isfinite(latent_norm_eps)):
            raise ConfigError(
                "latent_norm_eps is no epsilon", got=latent_norm_eps, expected="a number above 0"
            )
        glm5 = glm5.model_copy(update={"latent_norm_eps": latent_norm_eps})
    with open_checkpoint(folder, glm5) as reader:
        has_mtp = check_hf_tensors(reader, glm5)
        if include_mtp and not has_mtp:
            raise CheckpointError(
                "the checkpoint has no MTP layer",
                got=f"{folder}: num_nextn_predict_layers = {glm5.num_nextn_predict_layers}",
                remedy="load it without MTP; transformers drops the MTP layer when it saves",
            )
        model = build_for(
            glm5,
            dtype=dtype,
            device=device,
            backend=backend,
            recompute=recompute,
            indexer_loss_coeff=indexer_loss_coeff,
            deterministic_attention=deterministic_attention,
            include_mtp=include_mtp,
            layers_per_stage=layers_per_stage,
        )
        rules = glm5_rules(glm5, include_mtp=include_mtp)
        unused = () if include_mtp else mtp_hf_names(glm5)
        load_hf_weights(
            model, reader, rules, unused=unused, exact=_is_own(glm5, dtype), progress=progress
        )
    return model.eval()


def build_for(
    glm5: Glm5Config,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    **options: Any,
) -> GPTModel:
    """The model without its weights, on a device and in a process group that are started if needed.

    `options` go to glm5_transformer_config.
    """
    place = checked_device(device) if device is not None else default_device()
    dtype = torch_dtype(glm5.dtype if dtype is None else dtype)
    ensure_distributed(place)
    config = glm5_transformer_config(
        glm5,
        device=place,
        dtype=dtype,
        backend=default_backend(place.type) if backend is None else backend,
        layout=current_layout(),
        **options,
    )
    return build_model(config)


def _is_own(glm5: Glm5Config, dtype: torch.dtype | str | None) -> bool:
    """Whether the checkpoint's own dtype is meant; then its values must all fit it."""
    return dtype is None or torch_dtype(dtype) == getattr(torch, glm5.dtype)
