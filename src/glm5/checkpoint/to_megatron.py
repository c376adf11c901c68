"""`glm5 convert`: a Hugging Face folder as a Megatron-Core checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.ckpt_dir import HF_FOLDER, MCORE_FOLDER, CheckpointRecord, write_record
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.hf_files import copy_small_files
from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.hf_layout import check_hf_tensors
from glm5.checkpoint.load import load_model
from glm5.checkpoint.megatron_io import save_sharded
from glm5.config import Glm5Config


def convert(
    hf_dir: str | Path,
    ckpt_dir: str | Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointRecord:
    """Writes the new folder `ckpt_dir` in the checkpoint's own dtype, with MTP where it is shipped.

    Memory: the model and the largest tensor. The folder appears complete or not at all.

    Raises:
        ConfigError, CheckpointError: the source is not right, or `ckpt_dir` is taken.
    """
    source = hf_folder(hf_dir)
    glm5 = Glm5Config.from_hf(source)
    with new_folder(ckpt_dir) as staging:
        with open_checkpoint(source, glm5) as reader:
            include_mtp = check_hf_tensors(reader, glm5)
        model = load_model(source, include_mtp=include_mtp, progress=progress)
        (staging / MCORE_FOLDER).mkdir()
        save_sharded(staging / MCORE_FOLDER, {"model": model.sharded_state_dict()})
        plain = glm5.model_copy(update={"fp8": None})
        record = CheckpointRecord(
            kind="model", config=plain.to_hf_dict(), dtype=glm5.dtype, include_mtp=include_mtp
        )
        write_record(staging, record)
        copy_small_files(source, staging / HF_FOLDER)
    return record
