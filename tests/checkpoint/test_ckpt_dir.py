"""glm5.json and the steps of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.checkpoint.ckpt_dir import (
    RECORD_FILE,
    CheckpointRecord,
    LoraRecord,
    find_checkpoint,
    read_record,
    saved_steps,
    step_folder,
    write_record,
)
from glm5.errors import CheckpointError

RECORD = CheckpointRecord(
    kind="adapter",
    step=7,
    config={"hidden_size": 8, "eos_token_id": [1, 2]},
    dtype="bfloat16",
    include_mtp=False,
    base="owner/name",
    lora=LoraRecord(rank=2, alpha=0.5, targets=["o_proj"]),
    run={"train": {"steps": 9}},
)


def test_a_record_comes_back(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 2}, "1 validation error"),
        ({"kind": "optimizer"}, "1 validation error"),
        ({"step": "7"}, "1 validation error"),
        ({"surprise": 1}, "1 validation error"),
    ],
)
def test_another_record_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    raw = json.loads(RECORD.model_dump_json()) | change
    (tmp_path / RECORD_FILE).write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"not a checkpoint of glm5(?s:.*){named}"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\udcff"])
def test_no_record_is_no_checkpoint(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / RECORD_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match="not a checkpoint of glm5"):
        read_record(tmp_path)


def test_steps_are_found_in_order_and_nothing_else_is_a_step(tmp_path: Path) -> None:
    assert saved_steps(tmp_path) == []
    for step in (100, 9, 12345678):
        step_folder(tmp_path, step).mkdir(parents=True)
    for name in ("step-1", ".step-00000200.partial-ab", "step-00000300.old", "latest"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert saved_steps(tmp_path) == [9, 100, 12345678]


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    for step in (9, 10):
        step_folder(tmp_path, step).mkdir(parents=True)
        write_record(step_folder(tmp_path, step), RECORD)
    assert find_checkpoint(tmp_path) == step_folder(tmp_path, 10)
    assert find_checkpoint(step_folder(tmp_path, 9)) == step_folder(tmp_path, 9)
