"""Builds the model that a checkpoint of glm5 holds."""

from __future__ import annotations

from pathlib import Path

from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.ckpt_dir import MCORE_FOLDER, CheckpointRecord
from glm5.checkpoint.load import build_for, load_model
from glm5.checkpoint.megatron_io import load_sharded
from glm5.checkpoint.trained import adapt, load_trained, sharded_trained
from glm5.config import Glm5Config


def restore_model(checkpoint: Path, record: CheckpointRecord, dtype: str) -> GPTModel:
    """The checkpoint's model in evaluation mode, in `dtype`; adapters sit on the base they name.

    Raises:
        CheckpointError: the checkpoint or its base is damaged, missing, or of another model.
    """
    model = _untrained(record, dtype)
    # the optimiser's tensors stay on disk
    state = load_sharded(
        checkpoint / MCORE_FOLDER, {"model": sharded_trained(model)}, allow_unread=True
    )
    load_trained(model, state["model"])
    return model.eval()


def _untrained(record: CheckpointRecord, dtype: str) -> GPTModel:
    glm5 = Glm5Config.from_hf_dict(record.config)
    if record.lora is None:
        (model,) = build_for(glm5, dtype=dtype, include_mtp=record.include_mtp)
        return model
    assert record.base is not None
    model = load_model(
        record.base,
        dtype=dtype,
        latent_norm_eps=glm5.latent_norm_eps,
        base_weights=record.base_weights,
    )
    adapt([model], record.lora, seed=0)
    return model
