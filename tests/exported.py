"""What a test asks of an exported folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from glm5.checkpoint.ckpt_dir import find_checkpoint, read_record
from glm5.checkpoint.load import load_model
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.export.restore import restore_model
from glm5.model.forward import logits
from tests.tiny_models import draw_tokens

SMALL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
TOKENS = 40


def tensors_of(folder: Path) -> dict[str, Tensor]:
    with SafetensorsReader(folder) as reader:
        return {name: reader.read(name) for name in reader.names()}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def trained_logits(run_dir: Path) -> Tensor:
    """Of the checkpoint as it trained, in fp32."""
    checkpoint = find_checkpoint(run_dir)
    return _logits(restore_model(checkpoint, read_record(checkpoint), "float32"))


def base_logits(folder: Path) -> Tensor:
    return _logits(load_model(folder, dtype="float32"))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return logits(model, draw_tokens(TOKENS))


def plain_transformers(folder: Path) -> Any:
    """What a user of transformers loads, in fp32; nothing of glm5 has a part in it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def transformers_logits(model: Any) -> Tensor:
    """Of a transformers or PEFT model, on the same tokens."""
    logits: Tensor = model(input_ids=draw_tokens(TOKENS)[None], use_cache=False).logits[0]
    return logits


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest of b."""
    return float((a - b).abs().max() / b.abs().max())
