import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm5.checkpoint.safetensors_file import plan_of
from glm5.checkpoint.safetensors_index import INDEX_FILE, SINGLE_FILE
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.errors import CheckpointError

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(folder: Path, max_shard_bytes: int = 100) -> dict[str, torch.Tensor]:
    """Two shards: `a` and `c` in the first, `b` in the second."""
    tensors = {"a": torch.randn(3, 5), "c": torch.tensor(7, dtype=torch.int64), "b": torch.randn(9)}
    with SafetensorsWriter(folder, plan_of(tensors), max_shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return tensors


def edit_index(folder: Path, **weight_map: str | None) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"] |= weight_map
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_round_trip_is_bitwise_and_shards_have_their_size(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m")
    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert files == [SHARD_1, SHARD_2, INDEX_FILE]
    index = json.loads((tmp_path / "m" / INDEX_FILE).read_text())
    assert index == {
        "metadata": {"total_size": 60 + 8 + 36},
        "weight_map": {"a": SHARD_1, "b": SHARD_2, "c": SHARD_1},
    }
    with SafetensorsReader(tmp_path / "m") as reader:
        assert set(reader.names()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name), tensor)
            assert reader.read(name).dtype == reader.dtype(name) == tensor.dtype
            assert reader.shape(name) == tuple(tensor.shape)
        assert reader.file_of("b") == tmp_path / "m" / SHARD_2


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8]
)
def test_dtypes_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    with SafetensorsWriter(tmp_path / "m", plan_of({"w": tensor})) as writer:
        writer.add("w", tensor)
    reader = SafetensorsReader(tmp_path / "m")
    assert reader.dtype("w") == dtype
    assert torch.equal(reader.read("w").view(torch.uint8), tensor.view(torch.uint8))
    part = reader.read_slice("w", 1, 1, 3)
    assert torch.equal(part.float(), tensor[:, 1:3].float())


def test_a_single_file_without_index(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / SINGLE_FILE)
    assert torch.equal(SafetensorsReader(tmp_path).read("w"), torch.ones(2))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": SINGLE_FILE}}))
    with pytest.raises(CheckpointError, match="holds both"):
        SafetensorsReader(tmp_path)


def test_slices(tmp_path: Path) -> None:
    a = write(tmp_path / "m")["a"]
    reader = SafetensorsReader(tmp_path / "m")
    assert torch.equal(reader.read_slice("a", 0, 1, 3), a[1:3])
    assert torch.equal(reader.read_slice("a", 1, 4, 5), a[:, 4:5])
    assert reader.read_slice("a", 1, 0, 3).is_contiguous()
    assert reader.read_slice("a", 0, 2, 2).shape == (0, 5)
    for dim, start, stop in [(0, 0, 4), (1, -1, 2), (0, 2, 1), (2, 0, 1), (-1, 0, 1)]:
        with pytest.raises(CheckpointError, match="a has no such slice"):
            reader.read_slice("a", dim, start, stop)


def test_tensors_own_their_memory_and_outlive_the_reader(tmp_path: Path) -> None:
    a = write(tmp_path / "m")["a"]
    reader = SafetensorsReader(tmp_path / "m")
    whole, part = reader.read("a"), reader.read_slice("a", 0, 0, 1)
    reader.close()
    reader.close()
    assert whole.untyped_storage().nbytes() == a.nbytes
    assert part.untyped_storage().nbytes() == a[:1].nbytes
    assert torch.equal(reader.read("a"), a)
    # A tensor that were still a map of the file would now change with it.
    file = reader.file_of("a")
    with file.open("r+b") as shard:
        shard.write(bytes(file.stat().st_size))
    assert torch.equal(whole, a)
    assert torch.equal(part, a[:1])


def test_unknown_tensor(tmp_path: Path) -> None:
    write(tmp_path / "m")
    with pytest.raises(CheckpointError, match="no tensor x in"):
        SafetensorsReader(tmp_path / "m").read("x")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "null",
        "{",
        '{"weight_map": {}}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_a_bad_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        SafetensorsReader(tmp_path)


def test_a_tensor_listed_twice(tmp_path: Path) -> None:
    write(tmp_path / "m")
    text = (tmp_path / "m" / INDEX_FILE).read_text()
    doubled = text.replace('"a":', f'"b": "{SHARD_1}", "a":')
    (tmp_path / "m" / INDEX_FILE).write_text(doubled)
    with pytest.raises(CheckpointError, match="repeated keys: 1: b"):
        SafetensorsReader(tmp_path / "m")


@pytest.mark.parametrize(
    "file",
    [
        "/etc/w.safetensors",
        "../w.safetensors",
        "sub/w.safetensors",
        "..",
        "",
        "..\\w.safetensors",
        "C:w.safetensors",
        "weights.bin",
    ],
)
def test_an_index_that_points_elsewhere(tmp_path: Path, file: str) -> None:
    write(tmp_path / "m")
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    edit_index(tmp_path / "m", a=file)
    with pytest.raises(CheckpointError, match="names a shard that it must not"):
        SafetensorsReader(tmp_path / "m")


@pytest.mark.parametrize("file", [SHARD_1, SINGLE_FILE])
def test_a_link_out_of_the_folder(tmp_path: Path, file: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / file).symlink_to("../outside.safetensors")
    if file == SHARD_1:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="link out of its folder"):
        SafetensorsReader(folder)


def test_a_hub_snapshot_of_links_into_blobs(tmp_path: Path) -> None:
    a = write(tmp_path / "m")["a"]
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (tmp_path / "m").rename(repo / "blobs")
    for blob in (repo / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert torch.equal(SafetensorsReader(snapshot).read("a"), a)
    (tmp_path / "linked").symlink_to(snapshot)
    assert torch.equal(SafetensorsReader(tmp_path / "linked").read("a"), a)


def test_a_missing_shard(tmp_path: Path) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / SHARD_2).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD_2} is missing"):
        SafetensorsReader(tmp_path / "m")


def test_index_and_headers_that_disagree(tmp_path: Path) -> None:
    write(tmp_path / "m")
    edit_index(tmp_path / "m", ghost=SHARD_1)
    with pytest.raises(CheckpointError, match=f"(?s){SHARD_1} lacks tensors.*1: ghost"):
        SafetensorsReader(tmp_path / "m")
    edit_index(tmp_path / "m", ghost=None, c=None)
    with pytest.raises(CheckpointError, match=f"(?s){SHARD_1} holds tensors.*1: c"):
        SafetensorsReader(tmp_path / "m")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path / "m")
    save_file({"a": torch.ones(1), "b": torch.ones(9)}, tmp_path / "m" / SHARD_2)
    with pytest.raises(CheckpointError, match=f"(?s){SHARD_2} holds tensors.*1: a"):
        SafetensorsReader(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_shard(tmp_path: Path, keep: int) -> None:
    write(tmp_path / "m")
    shard = tmp_path / "m" / SHARD_2
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{SHARD_2} cannot be read"):
        SafetensorsReader(tmp_path / "m")


def test_a_shard_that_is_no_safetensors_file(tmp_path: Path) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / SHARD_1).write_bytes(b"PK\x03\x04" + bytes(200))
    with pytest.raises(CheckpointError, match=f"{SHARD_1} cannot be read"):
        SafetensorsReader(tmp_path / "m")


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"(?s)never loaded: pytorch_model\.bin.*remedy"):
        SafetensorsReader(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        SafetensorsReader(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        SafetensorsReader(tmp_path)
