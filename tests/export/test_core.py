"""Checkpoints of the core's own DSA modules, written and read back bit for bit."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.core_layout import NormPlace
from glm5.checkpoint.core_reader import CoreReader
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.export.core import core_from_hf, core_to_hf
from glm5.runtime.megatron_core import RopeSlice
from tests.tiny_models import TinyFolder

LAYOUTS: list[tuple[RopeSlice, NormPlace]] = [("last", "fused"), ("first", "own")]
WQ_B = "self_attention.core_attention.indexer.linear_wq_b.weight"


def tensors(folder: Path) -> dict[str, Tensor]:
    with SafetensorsReader(folder) as reader:
        return {name: reader.read(name) for name in reader.names()}


def assert_same(got: Path, expected: Path) -> None:
    ours, theirs = tensors(got), tensors(expected)
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    assert all(ours[n].dtype == theirs[n].dtype for n in ours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rope", "norms"), LAYOUTS)
@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_there_and_back(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    variant: str,
    rope: RopeSlice,
    norms: NormPlace,
    dtype: str,
) -> None:
    folder = tiny_folder(variant, dtype=dtype)
    core_from_hf(folder, tmp_path / "core", indexer_rope=rope, latent_norms=norms)
    # the release is told by the names alone
    layout = core_to_hf(tmp_path / "core", folder, tmp_path / "back")
    assert (layout.indexer_rope, layout.latent_norms) == (rope, norms)
    assert_same(tmp_path / "back", folder)
    assert Glm5Config.from_hf(tmp_path / "back") == Glm5Config.from_hf(folder)


def test_the_swap_is_what_differs_and_the_wrong_one_shows(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder("5")
    for rope in ("first", "last"):
        core_from_hf(folder, tmp_path / rope, indexer_rope=rope, latent_norms="own")
    first, last = (CoreReader(tmp_path / rope) for rope in ("first", "last"))
    differ = {n for n in first.names() if not torch.equal(first.read(n), last.read(n))}
    assert {n.partition(".indexer.")[2] for n in differ} == {
        "linear_wq_b.weight",
        "linear_wk.weight",
        "k_norm.weight",
        "k_norm.bias",
    }
    # taken for one of a release that rotates the first dimensions, it comes back as another model
    core_to_hf(tmp_path / "last", folder, tmp_path / "wrong")
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "wrong", folder)
    core_to_hf(tmp_path / "last", folder, tmp_path / "right", indexer_rope="last")
    assert_same(tmp_path / "right", folder)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(state, str(folder))
    return folder


def trainers_state(core: Path, **changed: Tensor | None) -> dict[str, Any]:
    """What a trainer would save: the model, an optimiser's tensor and plain values."""
    from megatron.core.dist_checkpointing import ShardedTensor

    reader = CoreReader(core)
    state: dict[str, Any] = {"iteration": 7, "args": {"lr": 1.0}}
    every = {name: reader._read_whole(name) for name in reader._tensors} | changed
    every["optimizer.state.exp_avg.x"] = torch.zeros(3)
    for name, tensor in every.items():
        if tensor is not None:
            state[name] = ShardedTensor.from_rank_offsets(name, tensor)
    return state


@pytest.fixture
def core(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    core_from_hf(tiny_folder("5"), tmp_path / "core")
    return tmp_path / "core"


def test_what_a_trainer_saves_beside_the_model_is_left_out(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    words = CoreReader(core).read("embedding.word_embeddings.weight")
    padded = torch.cat([words, torch.zeros(24, words.shape[1])])
    state = trainers_state(core, **{"embedding.word_embeddings.weight": padded})
    run = tmp_path / "run"
    run.mkdir()
    saved(run / "iter_0000007", state)
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    core_to_hf(run, tiny_folder("5"), tmp_path / "back")
    assert_same(tmp_path / "back", tiny_folder("5"))


def test_a_missing_or_additional_tensor_is_named(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    name = f"decoder.layers.1.{WQ_B}"
    for number, (other, tensor) in enumerate([(name, None), ("more.weight", torch.zeros(2))]):
        folder = saved(tmp_path / str(number), trainers_state(core, **{other: tensor}))
        with pytest.raises(CheckpointError, match="do not cover") as caught:
            core_to_hf(folder, tiny_folder("5"), tmp_path / "back")
        assert other in str(caught.value.got)
    assert not (tmp_path / "back").exists()


def test_a_vocabulary_that_is_too_small_is_refused(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    state = trainers_state(core, **{"output_layer.weight": torch.zeros(8, 64)})
    folder = saved(tmp_path / "small", state)
    with pytest.raises(CheckpointError, match="another vocabulary"):
        core_to_hf(folder, tiny_folder("5"), tmp_path / "back")


def test_an_index_that_names_code_is_refused(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    (core / "release" / ".metadata").write_bytes(pickle.dumps(eval))
    with pytest.raises(CheckpointError, match="more than an index"):
        core_to_hf(core, tiny_folder("5"), tmp_path / "back")


def test_a_tracker_that_names_nothing_is_refused(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    shutil.rmtree(core / "release")
    with pytest.raises(CheckpointError, match="names a checkpoint that is not there"):
        core_to_hf(core, tiny_folder("5"), tmp_path / "back")
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        core_to_hf(tmp_path, tiny_folder("5"), tmp_path / "back")


@pytest.mark.parametrize("latest", [b"", b"-1", b"../release", b"\xff\xfe"])
def test_a_tracker_that_says_nothing_of_use_is_refused(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path, latest: bytes
) -> None:
    (core / "latest_checkpointed_iteration.txt").write_bytes(latest)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        core_to_hf(core, tiny_folder("5"), tmp_path / "back")


def largest(folder: Path) -> Path:
    """Under 0.16 a checkpoint of one process has several files of tensors."""
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def test_bytes_that_changed_since_they_were_saved_are_refused(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    """One bit, which torch's own format does not see; files that a trainer adds may be there."""
    (core / "release" / "run_config.yaml").write_text("added: later")
    core_to_hf(core, tiny_folder("5"), tmp_path / "whole")
    data = largest(core / "release")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x40
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="files changed since they were saved"):
        core_to_hf(core, tiny_folder("5"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_truncated_file_without_hashes_is_refused_with_the_reason(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    (core / "release" / "integrity.json").unlink()
    data = largest(core / "release")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        core_to_hf(core, tiny_folder("5"), tmp_path / "back")
    assert "Error: " in str(caught.value.got)
    assert not (tmp_path / "back").exists()


def test_values_that_the_dtype_of_the_model_does_not_hold_are_refused(
    tiny_folder: TinyFolder, tmp_path: Path, core: Path
) -> None:
    with pytest.raises(CheckpointError, match="would be rounded") as caught:
        core_to_hf(core, tiny_folder("5", dtype="bfloat16"), tmp_path / "back")
    assert "torch.float32" in str(caught.value.got)
    assert not (tmp_path / "back").exists()


def test_fp8_weights_are_dequantised(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    core_from_hf(tiny_folder("5", fp8=True), tmp_path / "core")
    reader = CoreReader(tmp_path / "core")
    assert not any(reader.read(name).dtype == torch.float8_e4m3fn for name in reader.names())
