"""`glm5 export --as adapter`: a PEFT folder."""

from __future__ import annotations

from pathlib import Path

from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.adapter_io import load_peft_model, verify_peft_adapter, write_peft_adapter
from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.ckpt_dir import CheckpointRecord
from glm5.checkpoint.dequantise import readable_by_transformers
from glm5.checkpoint.hf_folder import hf_folder
from glm5.config import Glm5Config
from glm5.errors import AdapterError, CheckFailedError
from glm5.export.check import ExportCheck, as_it_is, check_logits
from glm5.export.factors import adapter_factors
from glm5.model.transformer_config import torch_dtype
from glm5.parity.logits import paired_logits, probe_tokens


def export_adapter(model: GPTModel, record: CheckpointRecord, out_dir: Path) -> list[ExportCheck]:
    """Writes the adapters of an fp32 model as PEFT loads them, in the dtype that they trained in.

    Before the folder appears, PEFT has loaded it on the base model, every tensor and every weight's
    delta was found there, and the logits agree.

    Raises:
        CheckFailedError: PEFT drops or changes something, or computes other logits.
    """
    assert record.lora is not None and record.base is not None
    glm5: Glm5Config = model.config.glm5
    rank, alpha = record.lora.rank, record.lora.alpha
    factors = adapter_factors(model, torch_dtype(record.dtype))
    base = hf_folder(record.base)
    with new_folder(out_dir) as staging:
        folder = staging / "adapter"
        write_peft_adapter(
            folder, factors, rank=rank, alpha=alpha, config=glm5, base_name=record.base
        )
        with readable_by_transformers(base, glm5) as readable:
            try:
                verify_peft_adapter(folder, readable, glm5, factors, rank=rank, alpha=alpha)
            except AdapterError as error:
                raise CheckFailedError("PEFT does not load this adapter", got=error) from error
            peft_model = load_peft_model(folder, readable, glm5)
        token_ids = probe_tokens(glm5)
        # PEFT put its layers into the base model
        reference = peft_model.get_base_model()
        ours, theirs = paired_logits(model, reference, token_ids)
        checks = [check_logits("transformers + peft", theirs, ours)]
        checks += as_it_is(glm5, reference, token_ids, ours)
        _move_up(folder, staging)
    return checks


def _move_up(folder: Path, target: Path) -> None:
    for file in folder.iterdir():
        file.rename(target / file.name)
    folder.rmdir()
