"""`glm5 export --as adapter`: a folder for PEFT, SGLang or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.adapter import without_linears
from glm5.checkpoint.adapter_io import (
    Consumer,
    Engine,
    LoraAdapter,
    compare_adapters,
    load_peft_model,
    read_adapter,
    verify_peft_adapter,
    write_peft_adapter,
    write_serving_adapter,
)
from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.ckpt_dir import CheckpointRecord
from glm5.checkpoint.dequantise import as_float8_base, readable_by_transformers
from glm5.checkpoint.hf_folder import hf_folder
from glm5.config import Glm5Config
from glm5.errors import AdapterError, CheckFailedError
from glm5.export.check import ExportCheck, as_it_is, check_logits
from glm5.export.factors import trained_adapter
from glm5.model.transformer_config import torch_dtype
from glm5.parity.compare import relative_error
from glm5.parity.logits import paired_logits, probe_tokens


def export_adapter(
    model: GPTModel,
    record: CheckpointRecord,
    out_dir: Path,
    consumer: Consumer,
    without: Sequence[str] = (),
) -> list[ExportCheck]:
    """Writes the adapters of an fp32 model as `consumer` loads them, in the dtype they trained in.

    Before the folder appears it is verified. For "peft": PEFT has loaded it on the base model as it
    was trained on, every tensor and every weight's delta was found there, and the logits agree; how
    far they are on a base that was quantised for training is told. For an engine: the rules of its
    loader hold, and what is read back are the factors that trained, short of the linears in
    `without`.

    Raises:
        CheckFailedError: PEFT drops or changes something, or computes other logits; or the file
        holds other factors. AdapterError: the engine cannot serve what was adapted.
    """
    assert record.lora is not None and record.base is not None
    adapter = trained_adapter(model, torch_dtype(record.dtype))
    if consumer != "peft":
        adapter = without_linears(adapter, without)
        return _export_serving(model.config.glm5, record.base, out_dir, adapter, consumer)
    return _export_peft(model, record, out_dir, adapter)


def _export_serving(
    glm5: Glm5Config, base: str, out_dir: Path, adapter: LoraAdapter, engine: Engine
) -> list[ExportCheck]:
    with new_folder(out_dir) as staging:
        folder = staging / "adapter"
        report = write_serving_adapter(folder, adapter, engine, config=glm5, base_name=base)
        read = read_adapter(folder, glm5, "serving")
        error, limit = compare_adapters(read, adapter)
        _move_up(folder, staging)
    checks = [ExportCheck(f"factors read back from the {engine} folder", error, limit)]
    if report.num_rounded:
        checks.append(ExportCheck("linears rescaled, and rounded for it", report.num_rounded, None))
    return checks


def _export_peft(
    model: GPTModel, record: CheckpointRecord, out_dir: Path, adapter: LoraAdapter
) -> list[ExportCheck]:
    glm5: Glm5Config = model.config.glm5
    assert record.base is not None
    base = hf_folder(record.base)
    is_float8 = record.base_weights == "fp8"
    device = next(model.parameters()).device
    with new_folder(out_dir) as staging:
        folder = staging / "adapter"
        write_peft_adapter(folder, adapter, config=glm5, base_name=record.base)
        with (as_float8_base if is_float8 else readable_by_transformers)(base, glm5) as readable:
            try:
                verify_peft_adapter(folder, readable, glm5, adapter, device=device)
            except AdapterError as error:
                raise CheckFailedError("PEFT does not load this adapter", got=error) from error
            peft_model = load_peft_model(folder, readable, glm5, device=device)
        token_ids = probe_tokens(glm5)
        # PEFT put its layers into the base model
        reference = peft_model.get_base_model()
        ours, theirs = paired_logits(model, reference, token_ids)
        checks = [check_logits("transformers + peft", theirs, ours)]
        checks += as_it_is(glm5, reference, token_ids, ours)
        if is_float8 and glm5.fp8 is None:
            reference = load_peft_model(folder, base, glm5, device=device).get_base_model()
            _, theirs = paired_logits(model, reference, token_ids)
            what = "on the base as it is stored, not quantised"
            checks.append(ExportCheck(what, relative_error(theirs, ours), None))
        _move_up(folder, staging)
    return checks


def _move_up(folder: Path, target: Path) -> None:
    for file in folder.iterdir():
        file.rename(target / file.name)
    folder.rmdir()
