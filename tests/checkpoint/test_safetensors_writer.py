import json
import os
import stat
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.safetensors_file import TensorPlan, plan_of
from glm5.checkpoint.safetensors_index import INDEX_FILE
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.errors import CheckpointError

ONE = torch.ones(1)
TWO: TensorPlan = plan_of({"w": ONE, "x": ONE})


def write(folder: Path, **tensors: torch.Tensor) -> None:
    with SafetensorsWriter(folder, plan_of(tensors), max_shard_bytes=1) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


def float_plan(**sizes: int) -> TensorPlan:
    return {name: ((size,), torch.float32) for name, size in sizes.items()}


def test_a_tensor_of_exactly_the_limit_and_one_above_it(tmp_path: Path) -> None:
    plan = float_plan(a=5, b=5, c=1, d=11, e=0)
    with SafetensorsWriter(tmp_path / "m", plan, max_shard_bytes=40) as writer:
        for name, (shape, _) in plan.items():
            writer.add(name, torch.zeros(shape))
    index = json.loads((tmp_path / "m" / INDEX_FILE).read_text())
    shards = {name: int(file[6:11]) for name, file in index["weight_map"].items()}
    assert shards == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}
    assert index["metadata"] == {"total_size": 22 * 4}
    assert SafetensorsReader(tmp_path / "m").read("e").shape == (0,)


def test_the_order_of_add_changes_nothing(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3), "a": torch.randn(2, 2).bfloat16(), "c": torch.randn(4)}
    for folder, names in {"same": "bac", "other": "cab"}.items():
        with SafetensorsWriter(tmp_path / folder, plan_of(tensors), 20) as writer:
            for name in names:
                writer.add(name, tensors[name])
    files = sorted(path.name for path in (tmp_path / "same").iterdir())
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "same" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_a_tensor_is_written_before_add_returns(tmp_path: Path) -> None:
    buffer = torch.zeros(4, 6)
    plan = plan_of({"w": buffer.t(), "half": buffer[:2]})
    with SafetensorsWriter(tmp_path / "m", plan) as writer:
        writer.add("w", buffer.t())
        buffer.fill_(1)
        writer.add("half", buffer[:2])
    reader = SafetensorsReader(tmp_path / "m")
    assert torch.equal(reader.read("w"), torch.zeros(6, 4))
    assert torch.equal(reader.read("half"), torch.ones(2, 6))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w", ONE, "w is written twice"),
        ("y", ONE, "y is not in the plan"),
        ("x", torch.ones(2), "x is not as planned"),
        ("x", ONE.bfloat16(), "x is not as planned"),
    ],
)
def test_a_refused_tensor_leaves_no_folder(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    with (
        pytest.raises(CheckpointError, match=message),
        SafetensorsWriter(tmp_path / "m", TWO, max_shard_bytes=1) as writer,
    ):
        writer.add("w", ONE)
        writer.add(name, tensor)
    assert list(tmp_path.iterdir()) == []


def test_missing_tensors_are_named_and_leave_no_folder(tmp_path: Path) -> None:
    plan = float_plan(a=1, b=1, c=0)
    with (
        pytest.raises(CheckpointError, match=r"(?s)not written.*2: a, c"),
        SafetensorsWriter(tmp_path / "m", plan, max_shard_bytes=1) as writer,
    ):
        writer.add("b", ONE)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(tmp_path / "m", TWO) as writer:
        writer.add("w", ONE)
        writer.add("x", ONE)
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert list((tmp_path / "m").iterdir()) == []


def test_a_plan_that_cannot_be_written_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        SafetensorsWriter(tmp_path / "m", {"w": ((1,), torch.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_a_good_folder_is_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "m", a=ONE)
    with pytest.raises(CheckpointError, match="not an empty folder"):
        SafetensorsWriter(tmp_path / "m", TWO)
    writer = SafetensorsWriter(tmp_path / "n", TWO)
    writer.add("w", ONE)
    writer.add("x", ONE)
    # Another process finishes first.
    (tmp_path / "m").rename(tmp_path / "n")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["n"]
    assert SafetensorsReader(tmp_path / "n").names() == ["a"]


def test_nothing_is_in_place_before_close(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "m", TWO, max_shard_bytes=1)
    writer.add("w", ONE)
    writer.add("x", ONE)
    assert not (tmp_path / "m").exists()
    writer.close()
    assert set(SafetensorsReader(tmp_path / "m").names()) == {"w", "x"}


def test_other_files(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(b"{}\r\n")
    with SafetensorsWriter(tmp_path / "m", plan_of({"w": ONE})) as writer:
        writer.add("w", ONE)
        writer.add_text("config.json", "{}")
        writer.add_text("data/train.jsonl", "")
        writer.copy_file(source)
        for name in ("config.json", "../config.json", "/tmp/config.json", INDEX_FILE):
            with pytest.raises(CheckpointError, match="cannot write a file"):
                writer.add_text(name, "{}")
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == b"{}\r\n"
    assert (tmp_path / "m" / "data" / "train.jsonl").read_text() == ""


def test_shards_are_readable_as_other_files_are(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        write(tmp_path / "m", a=ONE, b=ONE)
    finally:
        os.umask(mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").iterdir()}
    assert modes == {0o644}
