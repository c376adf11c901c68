"""A whole tiny Hugging Face folder with random weights, for tests, demos and dry runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from glm5.checkpoint.fp8 import SCALE_SUFFIX
from glm5.checkpoint.fp8_config import with_fp8
from glm5.checkpoint.hf_layout import HfTensor, hf_tensors
from glm5.checkpoint.safetensors_file import plan_of
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.checkpoint.tiny_data import sorting_task, tiny_chats
from glm5.checkpoint.tiny_tokenizer import (
    EOS_TOKENS,
    PAD_TOKEN,
    build_tokenizer,
    tiny_tokenizer_files,
)
from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.ops.block_scaled import BLOCK, quantise

Variant = Literal["5", "5.1", "5.2"]
Dtype = Literal["float32", "bfloat16"]

# Small enough that even the smallest of these folders spans several shards.
SHARD_BYTES = 300_000


def write_tiny(
    folder: str | Path,
    variant: Variant = "5.2",
    seed: int = 0,
    *,
    fp8: bool = False,
    dtype: Dtype = "float32",
) -> Path:
    """Write a tiny checkpoint of the family: config, shards, tokenizer, chats, a task for rewards.

    5 and 5.1 publish one architecture and differ in their trained weights alone, so they are the
    same folder here: 3 layers (dense, sparse, sparse), each with an indexer. 5.2 has 7 layers (3
    dense) of which 0, 1, 2 and 6 have an indexer and the others share, and rope_theta 8e6. Both
    have one MTP layer. The same arguments give the same bytes. Norm weights are not constant and
    no bias is zero, so that a tensor that is mapped wrongly shows. With `fp8`, weights are stored
    as float8 with 128x128 block scales. Raises ConfigError for an unknown variant or a seed that is
    not in [0, 2**32), and CheckpointError for a folder that is not empty.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError("this is no seed", got=seed, expected="0 to 4294967295")
    raw = tiny_config(variant, fp8=fp8, dtype=dtype)
    tensors = dict(_weights(Glm5Config.from_hf_dict(raw), seed))
    with SafetensorsWriter(folder, plan_of(tensors), SHARD_BYTES) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        for name, text in _text_files(raw, seed).items():
            writer.add_text(name, text)
    return Path(folder)


def tiny_config(variant: Variant, *, fp8: bool = False, dtype: Dtype = "float32") -> dict[str, Any]:
    """The config.json of a tiny checkpoint, in the style of the published ones."""
    if variant not in get_args(Variant):
        raise ConfigError(
            "unknown variant",
            got=repr(variant),
            expected=" | ".join(get_args(Variant)),
            remedy="choose one of these; 5.3 has the architecture of 5.2",
        )
    raw = _COMMON | (_GLM52 if variant == "5.2" else _GLM5) | {"dtype": dtype} | _token_ids()
    return with_fp8(raw, BLOCK) if fp8 else raw


def _token_ids() -> dict[str, Any]:
    tokenizer = build_tokenizer()
    return {
        "eos_token_id": [tokenizer.token_to_id(token) for token in EOS_TOKENS],
        "pad_token_id": tokenizer.token_to_id(PAD_TOKEN),
    }


def _text_files(raw: dict[str, Any], seed: int) -> dict[str, str]:
    generation = {key: raw[key] for key in ("eos_token_id", "pad_token_id")}
    train, evaluation = tiny_chats(seed)
    shuffled, to_sort = sorting_task(seed)
    return {
        "config.json": _json(raw),
        "generation_config.json": _json({"do_sample": False, **generation}),
        **tiny_tokenizer_files(raw["max_position_embeddings"]),
        "data/train.jsonl": train,
        "data/eval.jsonl": evaluation,
        "data/shuffled.jsonl": shuffled,
        "data/sort.jsonl": to_sort,
    }


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _weights(config: Glm5Config, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, drawn in model order from one generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, spec in hf_tensors(config).items():
        weight = _draw(name, spec, generator)
        if config.fp8 is not None and spec.quantisable:
            scaled = quantise(weight, config.fp8.weight_block_size)
            yield name, scaled.values
            yield name + SCALE_SUFFIX, scaled.scales
        else:
            yield name, weight.to(getattr(torch, spec.dtype))


def _draw(name: str, spec: HfTensor, generator: torch.Generator) -> Tensor:
    """Random values of a size that keeps activations, scores and logits away from flat."""
    noise = torch.randn(spec.shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("k_norm.bias"):
        return 0.3 * noise
    if len(spec.shape) == 1:
        return 1.0 + 0.2 * noise
    if name == "model.embed_tokens.weight":
        return noise
    gain = 2.0 if name == "lm_head.weight" else 1.0
    return noise * gain * spec.shape[1] ** -0.5


_COMMON: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 16,
    # Few heads make exact ties of the index scores common, because of the ReLU.
    "index_n_heads": 16,
    "index_topk": 8,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    # More than one 128-block with a ragged rest, and even on 2 and 4 tensor-parallel ranks.
    "intermediate_size": 160,
    "kv_lora_rank": 24,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 32,
    # 256 bytes and the special tokens, rounded up to divide among tensor-parallel ranks.
    "vocab_size": 320,
}
_GLM5: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "max_position_embeddings": 16384,
    "num_hidden_layers": 3,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
_GLM52: dict[str, Any] = {
    "first_k_dense_replace": 3,
    # Published as qk_nope_head_dim, beside a smaller qk_rope_head_dim: readers trip over it.
    "head_dim": 24,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full"],
    "max_position_embeddings": 65536,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 4,
    "moe_router_dtype": "float32",
    "num_hidden_layers": 7,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
