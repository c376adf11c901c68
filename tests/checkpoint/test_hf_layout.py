import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.hf_layout import HfTensor, check_hf_tensors, hf_tensors
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.errors import CheckpointError

CONFIGS = Path(__file__).parents[2] / "src/glm5/configs"
BYTES = {"bfloat16": 2, "float32": 4}


class HeaderReader:
    """Names and shapes alone, as a reader shows them."""

    def __init__(self, tensors: dict[str, HfTensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.dtypes[name])

    def file_of(self, name: str) -> Path:
        return Path("model-00001-of-00002.safetensors")


def published(name: str) -> Glm5Config:
    return Glm5Config.from_hf_dict(json.loads((CONFIGS / name).read_text()))


def split_mtp(config: Glm5Config) -> tuple[dict[str, HfTensor], dict[str, HfTensor]]:
    prefix = f"model.layers.{config.num_hidden_layers}."
    tensors = hf_tensors(config)
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in tensors.items() if name not in mtp}, mtp


def test_glm5_counts_are_those_of_the_published_checkpoint() -> None:
    decoder, mtp = split_mtp(published("glm5.json"))
    assert (len(decoder), len(mtp)) == (59_079, 791)
    num_bytes = sum(prod(t.shape) * BYTES[t.dtype] for t in decoder.values())
    assert num_bytes == 1_487_822_475_264
    biases = [t for name, t in decoder.items() if name.endswith("e_score_correction_bias")]
    assert {t.dtype for t in biases} == {"float32"}
    num_parameters = sum(prod(t.shape) for t in decoder.values()) - 75 * 256
    assert num_parameters == 743_911_199_232


def test_glm52_counts_are_those_of_the_published_checkpoint() -> None:
    config = published("glm52.json")
    tensors = hf_tensors(config)
    decoder, mtp = split_mtp(config)
    assert (len(tensors), len(mtp)) == (59_585, 791)
    assert sum(prod(t.shape) for t in decoder.values()) - 75 * 256 == 743_377_000_704
    assert sum(prod(t.shape) for t in tensors.values()) == 753_329_940_480
    # The FP8 release adds one scale per quantised weight.
    assert sum(t.quantisable for t in tensors.values()) == 59_044


def test_indexers_stand_on_full_layers_and_on_mtp_only() -> None:
    config = Glm5Config.from_hf_dict(tiny_config("5.2"))
    tensors = hf_tensors(config)
    with_indexer = {int(n.split(".")[2]) for n in tensors if n.endswith("indexer.wk.weight")}
    assert with_indexer == {0, 1, 2, 6, 7}
    assert not any("embed_tokens" in n or "shared_head.head" in n for n in tensors if ".7." in n)


def test_check_tells_whether_mtp_is_shipped() -> None:
    config = Glm5Config.from_hf_dict(tiny_config("5"))
    decoder, mtp = split_mtp(config)
    assert check_hf_tensors(HeaderReader(decoder | mtp), config) is True
    assert check_hf_tensors(HeaderReader(decoder), config) is False


def test_check_rejects_part_of_mtp() -> None:
    config = Glm5Config.from_hf_dict(tiny_config("5"))
    tensors = hf_tensors(config)
    del tensors["model.layers.3.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=r"(?s)missing.*layers\.3\.eh_proj"):
        check_hf_tensors(HeaderReader(tensors), config)


def test_check_names_missing_extra_and_wrong_shaped_tensors() -> None:
    config = Glm5Config.from_hf_dict(tiny_config("5.2"))
    tensors = hf_tensors(config)
    missing = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"(?s)missing.*1: model\.norm\.weight"):
        check_hf_tensors(HeaderReader(missing), config)
    extra = "model.layers.3.self_attn.indexer.wk.weight"
    with pytest.raises(CheckpointError, match=r"(?s)does not know.*layers\.3\.self_attn"):
        check_hf_tensors(HeaderReader(tensors | {extra: HfTensor((16, 64), "float32")}), config)
    wrong = tensors | {"model.norm.weight": HfTensor((63,), "float32")}
    with pytest.raises(CheckpointError, match=r"(?s)model\.norm\.weight in model-00001-.*\(63,\)"):
        check_hf_tensors(HeaderReader(wrong), config)
    integers = tensors | {"model.norm.weight": HfTensor((64,), "int32")}
    with pytest.raises(CheckpointError, match=r"(?s)model\.norm\.weight in .*torch\.int32"):
        check_hf_tensors(HeaderReader(integers), config)


def test_dtypes_are_torch_dtypes() -> None:
    for tensor in hf_tensors(published("glm52.json")).values():
        assert isinstance(getattr(torch, tensor.dtype), torch.dtype)


def test_the_layout_needs_no_torch() -> None:
    code = "import sys, glm5.checkpoint.hf_layout; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == "False\n"
