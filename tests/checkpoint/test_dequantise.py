"""FP8 checkpoints rewritten in the config's dtype, whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.dequantise import (
    as_float8_base,
    readable_by_transformers,
    rewrite_checkpoint,
)
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.hf_layout import check_hf_tensors, hf_tensors
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.config import Glm5Config
from glm5.ops.block_scaled import BlockScaled, quantise
from tests.tiny_models import TinyFolder


def test_the_copy_is_the_dequantised_checkpoint(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5", fp8=True, dtype="bfloat16")
    config = Glm5Config.from_hf(folder)
    rewrite_checkpoint(folder, tmp_path / "plain", config)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    plain = Glm5Config.from_hf(tmp_path / "plain")
    with open_checkpoint(folder, config) as source, SafetensorsReader(tmp_path / "plain") as copy:
        assert check_hf_tensors(copy, plain)
        assert sorted(source.names()) == sorted(copy.names())
        for name in copy.names():
            assert copy.dtype(name) == source.dtype(name)
            assert torch.equal(copy.read(name), source.read(name)), name
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (folder / name).read_bytes()


def test_change_sees_every_tensor_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5")
    seen: list[str] = []

    def negate(name: str, tensor: Tensor) -> Tensor:
        seen.append(name)
        return -tensor

    rewrite_checkpoint(folder, tmp_path / "hf", Glm5Config.from_hf(folder), negate)
    with SafetensorsReader(folder) as source, SafetensorsReader(tmp_path / "hf") as copy:
        assert sorted(seen) == sorted(source.names()) == sorted(set(seen))
        assert all(torch.equal(copy.read(name), -source.read(name)) for name in seen)


def test_a_failure_leaves_nothing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def fail(name: str, tensor: Tensor) -> Tensor:
        if "norm" in name:
            raise KeyError(name)
        return tensor

    folder = tiny_folder("5")
    with pytest.raises(KeyError):
        rewrite_checkpoint(folder, tmp_path / "hf", Glm5Config.from_hf(folder), fail)
    assert list(tmp_path.iterdir()) == []


def test_only_fp8_is_copied_and_the_copy_goes(tiny_folder: TinyFolder) -> None:
    plain = tiny_folder("5")
    with readable_by_transformers(plain, Glm5Config.from_hf(plain)) as readable:
        assert readable == plain
    quantised = tiny_folder("5", fp8=True, dtype="bfloat16")
    with readable_by_transformers(quantised, Glm5Config.from_hf(quantised)) as readable:
        assert readable != quantised and (readable / "config.json").is_file()
    assert not readable.exists() and quantised.exists()


@pytest.mark.parametrize("is_fp8", [True, False])
def test_a_float8_base_is_value_times_scale_in_fp32(tiny_folder: TinyFolder, is_fp8: bool) -> None:
    """Also of a folder in bf16, in whose dtype the products would be rounded."""
    folder = tiny_folder("5", fp8=is_fp8, dtype="bfloat16")
    glm5 = Glm5Config.from_hf(folder)
    layout = hf_tensors(glm5)
    with (
        as_float8_base(folder, glm5) as made,
        SafetensorsReader(folder) as source,
        SafetensorsReader(made) as copy,
    ):
        assert Glm5Config.from_hf(made).fp8 is None
        assert set(copy.names()) == set(layout)
        for name, tensor in layout.items():
            if not tensor.quantisable:
                assert torch.equal(copy.read(name), source.read(name))
                continue
            if is_fp8:
                weight = BlockScaled(source.read(name), source.read(f"{name}_scale_inv"))
            else:
                weight = quantise(source.read(name))
            assert torch.equal(copy.read(name), weight.dequantise(torch.float32))
    assert not made.exists()
