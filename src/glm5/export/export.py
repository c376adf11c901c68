"""`glm5 export`: picks the writer for what the checkpoint is and what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from glm5.checkpoint.adapter_engines import Consumer, Engine, check_servable
from glm5.checkpoint.atomic import check_is_free
from glm5.checkpoint.ckpt_dir import (
    STEPS_FOLDER,
    CheckpointRecord,
    find_checkpoint,
    read_record,
)
from glm5.checkpoint.fingerprint import CONFIG, WEIGHTS, base_fingerprints, changed_inputs
from glm5.checkpoint.hf_folder import hf_folder
from glm5.errors import AdapterError, CheckpointError
from glm5.export.adapter import export_adapter
from glm5.export.check import ExportCheck
from glm5.export.hf import export_hf
from glm5.export.merged import MergedWeights, export_merged
from glm5.export.restore import restore_model

Form = Literal["adapter", "merged", "hf"]


def export(
    checkpoint: Path,
    out_dir: Path,
    form: Form,
    consumer: Consumer = "peft",
    *,
    without: Sequence[str] = (),
    weights: MergedWeights | None = None,
) -> list[ExportCheck]:
    """Writes `checkpoint` (or the newest of a run) to the new folder `out_dir`, verified by
    loading. `consumer` is what loads an adapter; for an engine the linears named in `without` are
    left out of it. `weights` is how those of a merged checkpoint are stored; None: as the base's.

    Raises:
        CheckpointError: no such checkpoint, a form that does not fit it, or `out_dir` is taken or
        inside the checkpoint. AdapterError: the engine cannot serve what was adapted.
        CheckFailedError: what was written does not compute the same logits; it is removed.
    """
    checkpoint = find_checkpoint(checkpoint)
    record = read_record(checkpoint)
    check_is_free(out_dir)
    _check_place(checkpoint, out_dir)
    _check_form(checkpoint, record.kind, form)
    _check_consumer(form, consumer, without)
    _check_weights(form, weights)
    if record.lora is not None and consumer != "peft":
        _check_targets(record.lora.targets, consumer, without)
    _check_base(record)
    # the comparison is in fp32; written values keep the dtype that they trained in
    model = restore_model(checkpoint, record, dtype="float32")
    if form == "adapter":
        return export_adapter(model, record, out_dir, consumer, without)
    if form == "merged":
        return export_merged(model, record, out_dir, weights)
    return export_hf(model, record, checkpoint, out_dir)


def _check_place(checkpoint: Path, out_dir: Path) -> None:
    """A run takes what is in its folder of steps for its own."""
    checkpoint, out_dir = checkpoint.resolve(), out_dir.resolve()
    is_step = checkpoint.parent.name == STEPS_FOLDER
    kept = checkpoint.parent if is_step else checkpoint
    if out_dir.is_relative_to(kept):
        raise CheckpointError(
            f"{out_dir} is inside the checkpoint that is exported",
            expected=f"a folder outside {kept}",
            remedy="choose another folder",
        )


def _check_base(record: CheckpointRecord) -> None:
    """The logits are compared on the base, so that a changed one would agree with itself."""
    if record.base is None:
        return
    now = base_fingerprints(hf_folder(record.base))
    if changed := changed_inputs(record.inputs, {name: now[name] for name in (WEIGHTS, CONFIG)}):
        raise CheckpointError(
            f"{record.base} is not what the adapter was trained on",
            got=f"changed: {', '.join(changed)}",
            remedy="put the base back as it was",
        )


def _check_targets(targets: Sequence[str], engine: Engine, without: Sequence[str]) -> None:
    """Before a model is loaded for it."""
    if unknown := sorted(set(without) - set(targets)):
        raise AdapterError(
            "--without names what the adapter does not have",
            got=", ".join(unknown),
            expected=f"some of {', '.join(targets)}",
        )
    check_servable([name for name in targets if name not in without], engine)


def _check_consumer(form: Form, consumer: Consumer, without: Sequence[str]) -> None:
    if without and consumer == "peft":
        raise CheckpointError(
            "--without is for adapters that an engine serves",
            got=f"--without {' --without '.join(without)}",
            expected="--as adapter --for sglang, or vllm",
            remedy="leave it out: PEFT loads every linear",
        )
    if form != "adapter" and consumer != "peft":
        raise CheckpointError(
            f"--for {consumer} says nothing of --as {form}",
            expected="--for with --as adapter",
            remedy="leave --for out: a checkpoint of whole weights is loaded by all engines",
        )


def _check_weights(form: Form, weights: MergedWeights | None) -> None:
    if weights is not None and form != "merged":
        raise CheckpointError(
            f"--weights {weights} says nothing of --as {form}",
            expected="--weights with --as merged",
            remedy="leave it out: factors, and weights that trained, are written as they trained",
        )


def _check_form(checkpoint: Path, kind: str, form: Form) -> None:
    fitting = {"adapter": ("adapter", "merged"), "model": ("hf",)}[kind]
    if form not in fitting:
        raise CheckpointError(
            f"{checkpoint} cannot be exported as {form}",
            got=f"a checkpoint that holds {'adapters' if kind == 'adapter' else 'every weight'}",
            expected=f"--as {' or --as '.join(fitting)}",
            remedy="choose one of these",
        )
