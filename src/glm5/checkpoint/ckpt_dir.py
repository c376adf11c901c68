"""What a checkpoint folder of this project holds, and how it is found; no torch.

glm5.json   what the folder is: see CheckpointRecord
mcore/      tensors, written by megatron.core.dist_checkpointing, and the SHA-256 of every file
hf/         the small files of the Hugging Face folder: config.json, tokenizer, chat template
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from glm5.errors import CheckpointError
from glm5.lora.spec import ExpertLora, LoraSpec

RECORD_FILE = "glm5.json"
MCORE_FOLDER = "mcore"
HF_FOLDER = "hf"
STEPS_FOLDER = "checkpoints"
_STEP_NAME = re.compile(r"step-(\d{8})")


class LoraRecord(BaseModel):
    """The adapter of a checkpoint; fields as of `LoraSpec`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    rank: int
    alpha: float
    targets: list[str]
    dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    exclude: list[str] | str = []
    expert_lora: ExpertLora = "per_expert"
    train: list[str] = []
    """Whole parameters that train beside the adapter: see checkpoint.trained."""

    def spec(self) -> LoraSpec:
        """What to attach."""
        return LoraSpec(
            adapter_rank=self.rank,
            adapter_alpha=self.alpha,
            targets=tuple(self.targets),
            dropout=self.dropout,
            use_rslora=self.use_rslora,
            rank_pattern=self.rank_pattern,
            alpha_pattern=self.alpha_pattern,
            exclude=self.exclude if isinstance(self.exclude, str) else tuple(self.exclude),
            expert_lora=self.expert_lora,
        )


class CheckpointRecord(BaseModel):
    """glm5.json: enough to build the model that the tensors belong to."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    kind: Literal["model", "adapter"]
    """"model": every weight is here. "adapter": the frozen base is read from `base`."""
    step: int = 0
    """Optimizer steps taken; 0 for a converted checkpoint."""
    config: dict[str, Any]
    """config.json as it would be written, with latent_norm_eps where it is not the default."""
    dtype: str
    """Parameter dtype of the model."""
    include_mtp: bool
    """Whether the MTP layer is among the tensors."""
    base: str | None = None
    """Adapters only: the Hugging Face folder or repository of the base weights."""
    base_weights: Literal["dtype", "fp8"] = "dtype"
    """Adapters only: fp8 where they trained on linears in float8, which a base of another dtype was
    quantised to."""
    lora: LoraRecord | None = None
    """Adapters only."""
    inputs: dict[str, str] = {}
    """Fingerprints of the files that the run was started from, by what they are."""
    run: dict[str, Any] | None = None
    """The run that wrote it, as nested tables; None for a converted checkpoint."""


def write_record(folder: Path, record: CheckpointRecord) -> None:
    """Writes glm5.json."""
    text = record.model_dump_json(indent=2) + "\n"
    (folder / RECORD_FILE).write_text(text, encoding="utf-8")


def read_record(folder: Path) -> CheckpointRecord:
    """Reads and checks glm5.json.

    Raises:
        CheckpointError: there is none, or it is not one of this version.
    """
    path = folder / RECORD_FILE
    try:
        return CheckpointRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint of glm5",
            got=f"{RECORD_FILE}: {str(error).splitlines()[0]}",
            expected="a folder written by `glm5 convert` or `glm5 train`",
            remedy="pass such a folder, or the output folder of a run",
        ) from error


def step_folder(run_dir: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of `step`."""
    return run_dir / STEPS_FOLDER / f"step-{step:08d}"


def saved_steps(run_dir: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending; folders appear complete or not at all."""
    folder = run_dir / STEPS_FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := _STEP_NAME.fullmatch(name)))


def find_checkpoint(folder: Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest checkpoint of a run folder.

    Raises:
        CheckpointError: neither.
    """
    if (folder / RECORD_FILE).is_file():
        return folder
    steps = saved_steps(folder)
    if not steps:
        raise CheckpointError(
            f"{folder} holds no checkpoint",
            expected=f"{RECORD_FILE}, or {STEPS_FOLDER}/step-* inside it",
            remedy="pass a folder written by `glm5 convert`, or the output folder of a run",
        )
    return step_folder(folder, steps[-1])
