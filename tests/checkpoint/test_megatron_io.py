"""Sharded state: what was saved comes back, and no file of a checkpoint can run code."""

import dataclasses
import io
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from glm5.checkpoint.integrity import write_manifest
from glm5.checkpoint.megatron_io import load_sharded, save_sharded
from glm5.errors import CheckpointError
from glm5.runtime.distributed import default_device, ensure_distributed

WEIGHTS = torch.arange(6.0).view(2, 3)


def sharded(name: str = "w", data: torch.Tensor = WEIGHTS) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, data.clone())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one tensor and plain values; to be copied before it is changed."""
    ensure_distributed(default_device())
    folder = tmp_path_factory.mktemp("saved")
    values = {"step": 3, "rate": 0.1, "names": ["a", "b"], "groups": [{"lr": 1.0, "on": True}]}
    save_sharded(folder, {"w": sharded(), "v": sharded("v", WEIGHTS + 1), **values})
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "mcore"))


def load_all(folder: Path) -> dict[str, Any]:
    zeros = torch.zeros_like(WEIGHTS)
    return load_sharded(folder, {"w": sharded("w", zeros), "v": sharded("v", zeros)})


def test_tensors_and_values_come_back(saved: Path) -> None:
    loaded = load_all(saved)
    assert torch.equal(loaded["w"], WEIGHTS) and torch.equal(loaded["v"], WEIGHTS + 1)
    assert loaded["step"] == 3 and loaded["rate"] == 0.1
    assert loaded["names"] == ["a", "b"] and loaded["groups"] == [{"lr": 1.0, "on": True}]


def test_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path
) -> None:
    """Megatron's manager process would run a script without a main guard a second time."""
    import multiprocessing.process

    def started(self: Any) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", started)
    save_sharded(tmp_path, {"w": sharded()})
    assert (tmp_path / ".metadata").is_file()


def test_a_disk_that_takes_no_more_is_told(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"w": sharded("w", torch.zeros(1 << 20))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written(?s:.*)make room") as caught:
            save_sharded(tmp_path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "GiB free there" in str(caught.value.got)


def test_another_set_of_tensors_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"another set of tensors(?s:.*)'v'"):
        load_sharded(saved, {"w": sharded()})
    assert "v" not in load_sharded(saved, {"w": sharded()}, allow_unread=True)
    for allow in (True, False):
        with pytest.raises(CheckpointError, match=str(saved)):
            load_sharded(saved, {"x": sharded("x")}, allow_unread=allow)


def test_another_shape_is_refused(saved: Path) -> None:
    other = sharded("w", torch.zeros(3, 3))
    with pytest.raises(CheckpointError, match=str(saved)):
        load_sharded(saved, {"w": other}, allow_unread=True)


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        load_all(tmp_path)


def test_a_file_that_nobody_saved_is_refused(copied: Path) -> None:
    (copied / "more.distcp").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"more\.distcp: not among the files saved"):
        load_all(copied)


def test_megatron_reads_the_hashes(copied: Path) -> None:
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    if not hasattr(validation, "verify_integrity_manifest"):
        pytest.skip("this Megatron-Core has no hashes")
    validation.verify_integrity_manifest(str(copied))


def test_plain_values_in_a_file_of_their_own_run_no_code(copied: Path, tmp_path: Path) -> None:
    """As Megatron-Core up to 0.18 writes them; later ones read them."""
    mark = tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save([Call(os.system, f"touch {mark}")], buffer)
    (copied / "common.pt").write_bytes(buffer.getvalue())
    write_manifest(copied)
    with pytest.raises(CheckpointError, match=r"cannot be loaded(?s:.*)more than numbers"):
        load_all(copied)
    assert not mark.exists()


def test_every_flipped_byte_is_found(copied: Path) -> None:
    (shard,) = copied.glob("*.distcp")
    good = shard.read_bytes()
    at = good.index(WEIGHTS.numpy().tobytes())
    for byte in (0, at, at + WEIGHTS.nbytes - 1, len(good) - 1):
        flipped = bytearray(good)
        flipped[byte] ^= 1
        shard.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="files changed since") as caught:
            load_all(copied)
        assert shard.name in str(caught.value.got)
    shard.write_bytes(good)
    assert torch.equal(load_all(copied)["w"], WEIGHTS)


def test_a_cut_or_absent_file_is_named(copied: Path) -> None:
    (shard,) = copied.glob("*.distcp")
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: hash mismatch"):
        load_all(copied)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: file missing"):
        load_all(copied)


@pytest.mark.parametrize("manifest", [None, b"", b"{", b"[]", b'{"files": ["x"]}', b"\xff", b"{}"])
def test_a_checkpoint_that_cannot_be_checked_is_refused(
    copied: Path, manifest: bytes | None
) -> None:
    path = copied / "integrity.json"
    path.write_bytes(manifest) if manifest is not None else path.unlink()
    with pytest.raises(CheckpointError, match=r"integrity\.json cannot be read"):
        load_all(copied)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


@pytest.mark.parametrize(
    "function", [os.system, eval, torch.load, torch.save, torch.hub.load, io.open]
)
def test_an_index_that_names_code_is_refused_unexecuted(
    copied: Path, tmp_path: Path, function: Callable[..., Any]
) -> None:
    mark = tmp_path / "ran"
    (copied / ".metadata").write_bytes(pickle.dumps(Call(function, f"touch {mark}")))
    with pytest.raises(CheckpointError, match="damaged, or holds more than an index") as caught:
        load_all(copied)
    assert function.__name__ in str(caught.value.got)
    assert not mark.exists()


def hide_code_in_values(folder: Path, mark: Path) -> None:
    """Puts a pickle where the plain values are, with an index that finds nothing wrong."""
    buffer = io.BytesIO()
    torch.save([Call(os.system, f"touch {mark}")], buffer)
    code = buffer.getvalue()
    (shard,) = folder.glob("*.distcp")
    at = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(code)
    index = pickle.loads((folder / ".metadata").read_bytes())
    (key,) = (key for key in index.storage_data if "common_state" in key.fqn)
    place = dataclasses.replace(index.storage_data[key], offset=at, length=len(code))
    index.storage_data[key] = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_code_among_the_plain_values_is_refused_unexecuted(copied: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    hide_code_in_values(copied, mark)
    # whoever hides code can also write the hashes of what he wrote
    write_manifest(copied)
    with pytest.raises(CheckpointError, match=r"cannot be loaded(?s:.*)more than numbers"):
        load_all(copied)
    assert not mark.exists()
    # the trap itself works: torch alone falls into it
    from megatron.core import dist_checkpointing

    dist_checkpointing.load_common_state_dict(str(copied))
    assert mark.exists()


def test_torch_load_is_left_as_it_was(saved: Path, tmp_path: Path) -> None:
    before = torch.load
    load_all(saved)
    with pytest.raises(CheckpointError):
        load_sharded(saved, {"x": sharded("x")})
    assert torch.load is before
