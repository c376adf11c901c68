"""`glm5 export --as hf`: a model checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.ckpt_dir import HF_FOLDER, CheckpointRecord
from glm5.checkpoint.convert import hf_weights, mcore_tensors
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.hf_files import add_small_files
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Glm5Config
from glm5.export.check import ExportCheck, as_it_is, check_logits
from glm5.parity.hf_side import load_reference
from glm5.parity.logits import paired_logits, probe_tokens


def export_hf(
    model: GPTModel, record: CheckpointRecord, checkpoint: Path, out_dir: Path
) -> list[ExportCheck]:
    """Writes every weight under its Hugging Face name, in the dtype that it trained in.

    Before the folder appears, `transformers` has loaded it and computes the same logits.

    A checkpoint without the MTP layer gives a config.json that says so, instead of one that
    promises tensors which are not there.

    Raises:
        CheckFailedError: `transformers` computes other logits from the folder.
    """
    glm5 = exported_config(model.config.glm5, record.dtype, include_mtp=record.include_mtp)
    with new_folder(out_dir) as staging:
        folder = staging / "hf"
        write_hf(model, glm5, checkpoint / HF_FOLDER, folder, include_mtp=record.include_mtp)
        token_ids = probe_tokens(glm5)
        reference = load_reference(folder, glm5, next(model.parameters()).device)
        ours, theirs = paired_logits(model, reference, token_ids)
        checks = [check_logits("transformers on the exported folder", theirs, ours)]
        checks += as_it_is(glm5, reference, token_ids, ours)
        for file in folder.iterdir():
            file.rename(staging / file.name)
        folder.rmdir()
    return checks


def write_hf(
    model: GPTModel, glm5: Glm5Config, small_files: Path, folder: Path, *, include_mtp: bool
) -> None:
    """Writes every weight of a whole model, in the dtypes of `glm5`, and the small files of a
    Hugging Face folder; unverified."""
    rules = glm5_rules(glm5, include_mtp=include_mtp)
    plan = {
        name: (tensor.shape, getattr(torch, tensor.dtype))
        for name, tensor in hf_tensors(glm5).items()
    }
    with SafetensorsWriter(folder, plan) as writer:
        for name, tensor in hf_weights(mcore_tensors(model), rules):
            writer.add(name, tensor.to(plan[name][1]))
        add_small_files(writer, small_files, glm5)


def exported_config(glm5: Glm5Config, dtype: str, *, include_mtp: bool) -> Glm5Config:
    """The config.json of weights that trained in `dtype`."""
    raw = glm5.model_copy(update={"fp8": None}).in_dtype(dtype).to_hf_dict()
    if not include_mtp:
        raw["num_nextn_predict_layers"] = 0
    return Glm5Config.from_hf_dict(raw)
