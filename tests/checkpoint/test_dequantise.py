"""FP8 checkpoints rewritten in the config's dtype, whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.dequantise import readable_by_transformers, rewrite_checkpoint
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.hf_layout import check_hf_tensors
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.config import Glm5Config
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
