"""`convert`: bitwise through a real Megatron checkpoint, atomic, in the memory of one model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.ckpt_dir import HF_FOLDER, MCORE_FOLDER, read_record
from glm5.checkpoint.convert import hf_weights, mcore_tensors
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.to_megatron import convert
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.export.restore import restore_model
from tests.hf_folders import drop_mtp, rewrite, set_config
from tests.tiny_models import TinyFolder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("5", {}),
        ("5.2", {}),
        ("5.2", {"dtype": "bfloat16"}),
        ("5", {"dtype": "bfloat16", "fp8": True}),
    ],
)
def test_what_was_converted_is_the_checkpoint_bit_for_bit(
    tiny_folder: TinyFolder, tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    folder = tiny_folder(variant, **options)
    config = Glm5Config.from_hf(folder)
    record = convert(folder, tmp_path / "ckpt")
    assert record == read_record(tmp_path / "ckpt")
    assert (record.kind, record.step, record.include_mtp) == ("model", 0, True)
    assert record.dtype == config.dtype
    assert "quantization_config" not in record.config
    model = restore_model(tmp_path / "ckpt", record, record.dtype)
    got = dict(hf_weights(mcore_tensors(model), glm5_rules(config, include_mtp=True)))
    with open_checkpoint(folder, config) as reader:
        assert sorted(got) == sorted(reader.names())
        for name in reader.names():
            assert got[name].dtype == reader.dtype(name), name
            assert torch.equal(got[name], reader.read(name)), name
    small = {path.name for path in (tmp_path / "ckpt" / HF_FOLDER).iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= small
    assert not any("safetensors" in name for name in small)


def test_a_source_without_mtp_gives_a_checkpoint_without(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = rewrite(tiny_folder("5"), tmp_path / "hf", drop_mtp)
    record = convert(source, tmp_path / "ckpt")
    assert record.include_mtp is False
    model = restore_model(tmp_path / "ckpt", record, "float32")
    assert not any(name.startswith("mtp.") for name in mcore_tensors(model))


def test_a_folder_in_use_is_left_alone(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    target.mkdir()
    (target / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        convert(tiny_folder("5"), target)
    assert [path.name for path in target.iterdir()] == ["mine"]


def unfit_router(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.gate.weight"] = (
        tensors["model.layers.1.mlp.gate.weight"].float() * 1.001
    )


def test_a_failure_leaves_nothing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The router is read after most of the model, when the staging folder exists."""
    source = rewrite(tiny_folder("5", dtype="bfloat16"), tmp_path / "hf", unfit_router)
    with pytest.raises(CheckpointError, match="would be rounded"):
        convert(source, tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    # what its message says to do
    set_config(source, dtype="float32")
    record = convert(source, tmp_path / "ckpt")
    assert record.dtype == "float32"


def test_one_flipped_byte_of_a_tensor_is_seen(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    convert(tiny_folder("5"), tmp_path / "ckpt")
    (shard,) = (tmp_path / "ckpt" / MCORE_FOLDER).glob("*.distcp")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="files changed since they were saved"):
        restore_model(tmp_path / "ckpt", read_record(tmp_path / "ckpt"), "float32")


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Peaks above the start of each, in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        # every tensor is a mapping of its own, so that memory once freed never hides a peak
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
    }
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.converting"],
        cwd=tmp_path_factory.mktemp("converting"),
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("verb", ["load", "convert"])
def test_memory_is_the_model_and_the_largest_tensor(memory: dict[str, float], verb: str) -> None:
    slack = 12
    limit = memory["model"] + memory["largest"] + memory["shard"] + slack
    assert memory["load and keep"] > 1.8 * memory["model"] > limit
    assert memory["model"] <= memory[verb] <= limit
