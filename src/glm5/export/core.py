"""`glm5 convert-core`: checkpoints of Megatron-Core's own DSA modules, to and from Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.core_layout import (
    CoreLayout,
    NormPlace,
    core_rules,
    layout_of_core,
    layout_of_names,
    stacked_name,
)
from glm5.checkpoint.core_reader import RELEASE, TRACKER, CoreReader
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.hf_files import add_small_files
from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.hf_layout import check_hf_tensors, hf_tensors
from glm5.checkpoint.megatron_io import save_sharded
from glm5.checkpoint.rules import Rule, check_total
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.export.hf import exported_config
from glm5.runtime.distributed import ensure_distributed
from glm5.runtime.megatron_core import RopeSlice

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def core_to_hf(
    core_dir: Path, model: str | Path, out_dir: Path, *, indexer_rope: RopeSlice | None = None
) -> CoreLayout:
    """Writes the weights of a core's checkpoint into a new Hugging Face folder, bit for bit.

    config.json and tokenizer are those of `model`. `indexer_rope` as of `layout_of_names`. Rows
    that pad the vocabulary are left out. Memory: two stacks of experts of one layer.

    Raises:
        CheckpointError: not such a checkpoint, of an unknown layout, or of another model.
    """
    reader, source = CoreReader(core_dir), hf_folder(model)
    names = reader.names()
    include_mtp = any(name.startswith("mtp.") for name in names)
    glm5 = Glm5Config.from_hf(source)
    glm5 = exported_config(glm5, glm5.dtype, include_mtp=include_mtp)
    layout = layout_of_names(names, indexer_rope)
    rules = core_rules(glm5, layout, include_mtp=include_mtp)
    check_total(rules, [name for rule in rules for name in rule.hf_names], names)
    plan = {n: (t.shape, getattr(torch, t.dtype)) for n, t in hf_tensors(glm5).items()}
    with SafetensorsWriter(out_dir, plan) as writer:
        for rule in rules:
            for name, tensor in _hf_parts(rule, reader, glm5.vocab_size):
                writer.add(name, _exactly(name, tensor, plan[name][1]))
        add_small_files(writer, source, glm5)
    return layout


def core_from_hf(
    hf_dir: str | Path,
    out_dir: Path,
    *,
    indexer_rope: RopeSlice | None = None,
    latent_norms: NormPlace | None = None,
) -> CoreLayout:
    """Writes a Hugging Face folder as a core's checkpoint in a new trainer's folder.

    The layout is that of the installed Megatron-Core unless it is given. FP8 weights are
    dequantised. Memory: the whole model.

    Raises:
        ConfigError, CheckpointError: the source is not right, or `out_dir` is taken.
        MegatronCoreError: the installed Megatron-Core is not known.
    """
    source = hf_folder(hf_dir)
    glm5, layout = Glm5Config.from_hf(source), layout_of_core(indexer_rope, latent_norms)
    ensure_distributed(torch.device("cpu" if not torch.cuda.is_available() else "cuda"))
    with new_folder(out_dir) as staging:
        with open_checkpoint(source, glm5) as reader:
            include_mtp = check_hf_tensors(reader, glm5)
            rules = core_rules(glm5, layout, include_mtp=include_mtp)
            tensors = {rule.mcore_name: _in_core_dtype(rule, rule.load(reader)) for rule in rules}
        (staging / RELEASE).mkdir()
        plain = {"checkpoint_version": 3.0, "iteration": 0}
        sharded = _sharded(tensors, glm5.n_routed_experts)
        save_sharded(staging / RELEASE, {"model": sharded, **plain})
        (staging / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")
    return layout


def _hf_parts(rule: Rule, reader: CoreReader, vocab_size: int) -> Iterable[tuple[str, Tensor]]:
    tensor = reader.read(rule.mcore_name)
    if rule.mcore_name in _VOCABULARY:
        if len(tensor) < vocab_size:
            raise CheckpointError(
                f"{rule.mcore_name} has another vocabulary than config.json",
                got=f"{len(tensor)} rows",
                expected=f"{vocab_size}, or more that pad it",
                remedy="give the model that the checkpoint was trained from",
            )
        tensor = tensor[:vocab_size]
    return zip(rule.hf_names, rule.to_hf(tensor), strict=True)


def _exactly(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, which must hold the same values."""
    cast = tensor.to(dtype)
    if cast.dtype != tensor.dtype and not torch.equal(cast.to(tensor.dtype), tensor):
        raise CheckpointError(
            f"{name} would be rounded",
            got=f"{tensor.dtype} in the checkpoint",
            expected=f"values that are exact in {dtype}, the dtype of config.json",
            remedy="give a model folder whose config.json has the checkpoint's dtype",
        )
    return cast


def _in_core_dtype(rule: Rule, tensor: Tensor) -> Tensor:
    """Megatron keeps the bias of a router in fp32, whatever the model's dtype is."""
    return tensor.float() if rule.mcore_name.endswith(".expert_bias") else tensor


def _sharded(tensors: dict[str, Tensor], num_experts: int) -> dict[str, Any]:
    """One shard for each tensor; those of experts are shards of their stack."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key, expert = stacked_name(name)
        place = [] if expert is None else [(0, expert, num_experts)]
        state[name] = ShardedTensor.from_rank_offsets(
            key, tensor.contiguous(), *place, prepend_axis_num=len(place)
        )
    return state
