"""From a Hugging Face folder to a Megatron-Core model with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from glm5.model.build import build_chunks
from glm5.model.transformer_config import (
    DEFAULT_FP8_TRANSIENT_MIB,
    BaseWeights,
    Recompute,
    glm5_transformer_config,
    torch_dtype,
)
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
    base_weights: BaseWeights = "dtype",
    fp8_compute: bool = False,
    fp8_transient_mib: int = DEFAULT_FP8_TRANSIENT_MIB,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GPTModel:
    """The model of a Hugging Face checkpoint, in evaluation mode, with every tensor checked.

    Starts a process group and Megatron's parallel state of one process unless they exist. `backend`
    defaults to the device's, `dtype` ("float32", "bfloat16") to the checkpoint's, `device` to the
    GPU where there is one. In the checkpoint's dtype nothing is rounded. FP8 weights are
    dequantised, unless `base_weights` is "fp8": then what an FP8 release quantises stays so, or
    becomes so, and never trains. Of a layout with pipeline stages this is the rank's only one.

    Raises:
        ConfigError, CheckpointError, BackendError, LayoutError: see what each says.
    """
    (model,) = load_chunks(
        hf_dir,
        latent_norm_eps=latent_norm_eps,
        progress=progress,
        dtype=dtype,
        include_mtp=include_mtp,
        backend=backend,
        device=device,
        recompute=recompute,
        indexer_loss_coeff=indexer_loss_coeff,
        deterministic_attention=deterministic_attention,
        base_weights=base_weights,
        fp8_compute=fp8_compute,
        fp8_transient_mib=fp8_transient_mib,
    )
    return model


def load_chunks(
    hf_dir: str | Path,
    *,
    latent_norm_eps: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dtype: torch.dtype | str | None = None,
    include_mtp: bool = False,
    **options: Any,
) -> list[GPTModel]:
    """As `load_model`, for a rank that may have several interleaved stages.

    `options` go to `build_for`.
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
        chunks = build_for(glm5, dtype=dtype, include_mtp=include_mtp, **options)
        rules = glm5_rules(glm5, include_mtp=include_mtp)
        unused = () if include_mtp else mtp_hf_names(glm5)
        load_hf_weights(
            chunks, reader, rules, unused=unused, exact=_is_own(glm5, dtype), progress=progress
        )
    return [chunk.eval() for chunk in chunks]


def build_for(
    glm5: Glm5Config,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    **options: Any,
) -> list[GPTModel]:
    """The rank's stages without weights, on a device and in a process group, started if needed.

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
    return build_chunks(config)


def _is_own(glm5: Glm5Config, dtype: torch.dtype | str | None) -> bool:
    """Whether the checkpoint's own dtype is meant; then its values must all fit it."""
    return dtype is None or torch_dtype(dtype) == getattr(torch, glm5.dtype)
