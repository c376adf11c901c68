"""What a checkpoint records of its run, and whether a run may go on from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.checkpoint.ckpt_dir import (
    CheckpointRecord,
    LoraRecord,
    read_record,
    saved_steps,
    step_folder,
)
from glm5.checkpoint.fingerprint import base_fingerprints, changed_inputs, files_fingerprint
from glm5.config import Glm5Config
from glm5.errors import ConfigError, DataError
from glm5.train.run_file import RunFile, kind_of
from glm5.train.sections import LoraSection


def find_resume_step(run: RunFile) -> int:
    """The step that the run goes on from; 0 for a new run.

    Raises:
        ConfigError: the output folder is taken, has nothing to resume, or is of another run.
    """
    steps = saved_steps(run.output.dir)
    if run.train.resume == "never" and steps:
        raise ConfigError(
            "the output folder already holds checkpoints",
            got=f"{run.output.dir}: steps {steps}",
            expected="a new folder, since train.resume is 'never'",
            remedy="choose another output.dir, or set train.resume = 'auto'",
        )
    if not steps:
        if run.train.resume == "must":
            raise ConfigError(
                "there is nothing to resume",
                got=f"no checkpoint in {run.output.dir}",
                remedy="check output.dir, or set train.resume = 'auto'",
            )
        return 0
    _check_same_run(run, step_folder(run.output.dir, steps[-1]))
    if steps[-1] >= run.train.steps:
        raise ConfigError(
            "the run is finished already",
            got=f"a checkpoint of step {steps[-1]}",
            expected=f"fewer than train.steps = {run.train.steps}",
            remedy="raise train.steps, or choose another output.dir",
        )
    return steps[-1]


def input_fingerprints(folder: Path, data: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Of the base and of the data files of a run, by the names of their settings."""
    missing = [str(path) for paths in data.values() for path in paths if not path.is_file()]
    if missing:
        raise DataError("no such data file", got=", ".join(missing))
    return base_fingerprints(folder) | {
        name: files_fingerprint(paths) for name, paths in data.items()
    }


def check_inputs(checkpoint: Path, inputs: Mapping[str, str]) -> None:
    """A resumed run must find what it was started from.

    Raises:
        ConfigError: the base, the tokenizer or the data changed since `checkpoint`.
    """
    if changed := changed_inputs(read_record(checkpoint).inputs, inputs):
        raise ConfigError(
            "files changed since the run was started",
            got=f"changed: {', '.join(changed)}",
            expected=f"the files that {checkpoint} was trained on",
            remedy="put them back, or choose another output.dir",
        )


def checkpoint_record(
    run: RunFile, glm5: Glm5Config, step: int, inputs: dict[str, str]
) -> CheckpointRecord:
    """What the checkpoint of `step` says about itself."""
    lora = run.lora
    return CheckpointRecord(
        kind="adapter" if lora else "model",
        step=step,
        config=glm5.to_hf_dict(),
        dtype=run.model.dtype,
        include_mtp=run.model.mtp,
        base=run.model.path if lora else None,
        base_weights=run.model.base_weights,
        lora=lora_record(lora) if lora else None,
        inputs=inputs,
        run=run.to_toml_dict(),
    )


def lora_record(section: LoraSection) -> LoraRecord:
    """The `[lora]` table as a checkpoint records it."""
    return LoraRecord.model_validate(section.model_dump(mode="json", exclude={"init_from"}))


def _check_same_run(run: RunFile, checkpoint: Path) -> None:
    recorded = read_record(checkpoint).run or {}
    if changed := _changes(run, recorded, checkpoint):
        raise ConfigError(
            "the run differs from the one that it would resume",
            got=f"changed: {', '.join(changed)}",
            expected=f"the settings recorded in {checkpoint}",
            remedy="undo the changes, or choose another output.dir",
        )


def _changes(run: RunFile, recorded: Mapping[str, Any], checkpoint: Path) -> list[str]:
    kind, before = run.kind, kind_of(recorded)
    if kind != before:
        return [f"the kind of run, from {before} to {kind}"]
    return run.differences(type(run).from_dict(recorded, source=str(checkpoint)))
