from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.fp8 import (
    Fp8DequantReader,
    open_checkpoint,
)
from glm5.checkpoint.safetensors_file import plan_of
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Fp8Quantization, Glm5Config
from glm5.errors import CheckpointError

BLOCK = (128, 128)
FP8 = Fp8Quantization(weight_block_size=BLOCK)
F8 = torch.float8_e4m3fn


def by_element(weight: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """The definition, one element's block looked up at a time."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale[rows][:, columns]


def random_fp8(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    weight = torch.randn(rows, columns).to(F8)
    grid = -(-rows // block[0]), -(-columns // block[1])
    return weight, torch.rand(grid) + 0.5


def write(folder: Path, tensors: dict[str, Tensor]) -> SafetensorsReader:
    with SafetensorsWriter(folder, plan_of(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return SafetensorsReader(folder)


def test_reader_hides_scales_and_dequantises(tmp_path: Path) -> None:
    weight, scale = random_fp8(300, 200)
    norm = torch.randn(7)
    below = write(tmp_path / "m", {"w": weight, "w_scale_inv": scale, "norm": norm})
    with Fp8DequantReader(below, FP8, torch.float32) as reader:
        assert set(reader.names()) == {"w", "norm"}
        assert reader.shape("w") == (300, 200)
        assert reader.dtype("w") == torch.float32
        assert reader.file_of("w") == below.file_of("w")
        assert torch.equal(reader.read("w"), by_element(weight, scale))
        assert torch.equal(reader.read("norm"), norm)
        assert torch.equal(reader.read_slice("norm", 0, 2, 5), norm[2:5])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 300), (0, 128), (128, 256), (127, 129), (5, 6), (100, 300), (256, 300), (130, 130)],
)
def test_slices_need_not_fit_the_blocks(tmp_path: Path, dim: int, start: int, stop: int) -> None:
    weight, scale = random_fp8(300, 300)
    below = write(tmp_path / "m", {"w": weight, "w_scale_inv": scale})
    reader = Fp8DequantReader(below, FP8, torch.float32)
    expected = by_element(weight, scale).narrow(dim, start, stop - start)
    assert torch.equal(reader.read_slice("w", dim, start, stop), expected)


def test_a_slice_outside_the_tensor(tmp_path: Path) -> None:
    weight, scale = random_fp8(300, 300)
    below = write(tmp_path / "m", {"w": weight, "w_scale_inv": scale})
    for dim, stop in [(0, 301), (2, 1)]:
        with pytest.raises(CheckpointError, match="no such slice"):
            Fp8DequantReader(below, FP8, torch.float32).read_slice("w", dim, 0, stop)


def test_float8_without_scale_and_scale_without_float8(tmp_path: Path) -> None:
    weight, scale = random_fp8(4, 4)
    bare = write(tmp_path / "bare", {"w": weight})
    with pytest.raises(CheckpointError, match=r"(?s)without their _scale_inv.*1: w.*model-00001"):
        Fp8DequantReader(bare, FP8, torch.float32)
    orphan = write(tmp_path / "orphan", {"v_scale_inv": scale})
    with pytest.raises(CheckpointError, match=r"(?s)without a float8 weight.*v_scale_inv"):
        Fp8DequantReader(orphan, FP8, torch.float32)
    cast = write(tmp_path / "cast", {"w": weight.bfloat16(), "w_scale_inv": scale})
    with pytest.raises(CheckpointError, match="without a float8 weight"):
        Fp8DequantReader(cast, FP8, torch.float32)


def test_bad_scales_are_found_on_opening(tmp_path: Path) -> None:
    weight, scale = random_fp8(300, 4)
    shape = write(tmp_path / "shape", {"w": weight, "w_scale_inv": scale[:2]})
    with pytest.raises(CheckpointError, match="w_scale_inv has the wrong shape"):
        Fp8DequantReader(shape, FP8, torch.float32)
    dtype = write(tmp_path / "dtype", {"w": weight, "w_scale_inv": scale.bfloat16()})
    with pytest.raises(CheckpointError, match="w is not block-quantised"):
        Fp8DequantReader(dtype, FP8, torch.float32)


def test_open_checkpoint_follows_the_config(tmp_path: Path) -> None:
    weight, scale = random_fp8(4, 4)
    write(tmp_path / "m", {"w": weight, "w_scale_inv": scale})
    fp8 = Glm5Config.from_hf_dict(tiny_config("5", fp8=True, dtype="bfloat16"))
    assert open_checkpoint(tmp_path / "m", fp8).read("w").dtype == torch.bfloat16
    plain = Glm5Config.from_hf_dict(tiny_config("5"))
    with pytest.raises(CheckpointError, match="no quantization_config"):
        open_checkpoint(tmp_path / "m", plain)
    write(tmp_path / "n", {"w": weight.float()})
    assert torch.equal(open_checkpoint(tmp_path / "n", plain).read("w"), weight.float())
