from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.checkpoint.safetensors_file import DTYPES, SafetensorsFiles, plan_bytes, plan_of
from glm5.errors import CheckpointError

TENSORS = {
    "norm": torch.randn(7).bfloat16(),
    "experts.10": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "experts.9": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "scale": torch.randn(1, 2),
    "steps": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.zeros(4, 0),
    'nam\u00e9 "q"': torch.arange(3, dtype=torch.uint8),
}


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    """In whatever order the values come; shapes are of odd byte counts."""
    save_file(TENSORS, tmp_path / "library", metadata={"format": "pt"})
    files = SafetensorsFiles({tmp_path / "ours": plan_of(TENSORS)})
    for name in reversed(TENSORS):
        files.write(name, TENSORS[name])
    files.check_complete()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_a_file_has_its_final_size_from_the_start(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    files = SafetensorsFiles({tmp_path / "f": plan})
    content = (tmp_path / "f").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert header % 8 == 0
    assert len(content) == header + plan_bytes(plan)
    files.write("norm", TENSORS["norm"])
    assert len((tmp_path / "f").read_bytes()) == len(content)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_read_back_by_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"w": torch.arange(15).reshape(3, 5).to(dtype), "odd": torch.tensor([True])}
    files = SafetensorsFiles({tmp_path / "f": plan_of(tensors)})
    for name, tensor in tensors.items():
        files.write(name, tensor)
    read = load_file(tmp_path / "f")
    assert read["w"].dtype == dtype
    assert torch.equal(read["w"].view(torch.uint8), tensors["w"].view(torch.uint8))


def test_layouts_other_than_contiguous(tmp_path: Path) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    tensors = {
        "transposed": base.t(),
        "part": base[1:3, 2:5],
        "expanded": base[:1].expand(3, 6),
        "number": base[0, 0],
        "image": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    files = SafetensorsFiles({tmp_path / "f": plan_of(tensors)})
    for name, tensor in tensors.items():
        files.write(name, tensor)
    read = load_file(tmp_path / "f")
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


def test_a_file_without_tensors(tmp_path: Path) -> None:
    SafetensorsFiles({tmp_path / "f": {}}).check_complete()
    save_file({}, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "f").read_bytes() == (tmp_path / "library").read_bytes()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x", torch.ones(2, 3), "x is not in the plan"),
        ("done", torch.ones(1), "done is written twice"),
        ("w", torch.ones(3, 2), r"(?s)w is not as planned.*\(3, 2\).*\(2, 3\)"),
        ("w", torch.ones(6), "w is not as planned"),
        ("w", torch.ones(2, 3).int(), "(?s)w is not as planned.*int32.*float32"),
    ],
)
def test_a_tensor_that_is_not_as_planned(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    plan = {"w": ((2, 3), torch.float32), "done": ((1,), torch.float32)}
    files = SafetensorsFiles({tmp_path / "f": plan})
    files.write("done", torch.zeros(1))
    before = (tmp_path / "f").read_bytes()
    with pytest.raises(CheckpointError, match=message):
        files.write(name, tensor)
    assert (tmp_path / "f").read_bytes() == before


def test_a_tensor_that_could_not_be_written_is_missing(tmp_path: Path) -> None:
    files = SafetensorsFiles({tmp_path / "f": plan_of({"w": torch.ones(1)})})
    (tmp_path / "f").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        files.write("w", torch.ones(1))
    with pytest.raises(CheckpointError, match=r"(?s)not written.*1: w"):
        files.check_complete()
    (tmp_path / "gone").rename(tmp_path / "f")
    files.write("w", torch.ones(1))
    files.check_complete()


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    plan = {"z": ((1,), torch.complex128), "w": ((1,), torch.float32)}
    with pytest.raises(CheckpointError, match=r"(?s)cannot be written.*1: z \(torch.complex128\)"):
        SafetensorsFiles({tmp_path / "f": plan})
    assert list(tmp_path.iterdir()) == []
