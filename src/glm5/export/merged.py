"""`glm5 export --as merged`: the base checkpoint with the adapters added to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraAdapter, LoraFactors
from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.ckpt_dir import CheckpointRecord
from glm5.checkpoint.dequantise import rewrite_checkpoint
from glm5.checkpoint.fp8 import Fp8DequantReader, open_checkpoint
from glm5.checkpoint.fp8_config import quantisable_names
from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.load import load_model
from glm5.checkpoint.requantise import Weight, add_to_blocks, rewrite_as_fp8
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError
from glm5.export.check import ExportCheck, as_it_is, check_logits, share_lost
from glm5.export.factors import trained_adapter
from glm5.model.transformer_config import BaseWeights
from glm5.ops.block_scaled import BLOCK, BlockScaled, quantise
from glm5.parity.hf_side import load_reference
from glm5.parity.logits import mcore_logits, paired_logits, probe_tokens

MergedWeights = Literal["bf16", "fp8"]

# Rounding costs a small adapter some of its effect; past this the merge is pointless.
MAX_SHARE_LOST = 0.5


def export_merged(
    model: GPTModel,
    record: CheckpointRecord,
    out_dir: Path,
    weights: MergedWeights | None = None,
) -> list[ExportCheck]:
    """Writes W + scale * B A, summed in fp32 and rounded once.

    weights: "bf16", in the dtype of the base's config.json, from float8 dequantised; "fp8", linears
    in block-scaled float8 and the rest in that dtype; None, as the base is. Of a float8 base,
    blocks that the adapter leaves alone keep their bytes. W is what the adapter was trained on:
    where that was quantised from a base of another dtype, the quantised weight. Whole trained
    tensors (router, norms, embeddings, head) take the place of the base's, in its dtype. One tensor
    and the factors of one linear are in memory beside the model.

    Before the folder appears, `transformers` has loaded it (dequantised: it reads no ragged blocks)
    and agrees with glm5 on the same folder, and with the adapted model as far as the rounding of
    the weights allows.

    Raises:
        CheckFailedError: other logits, or weights too coarse for the adapter.
    """
    assert record.lora is not None and record.base is not None
    glm5: Glm5Config = model.config.glm5
    base = hf_folder(record.base)
    adapter = trained_adapter(model, torch.float32)
    source = Glm5Config.from_hf(base).model_copy(update={"latent_norm_eps": glm5.latent_norm_eps})
    if weights is None:
        weights = "bf16" if source.fp8 is None else "fp8"
    with new_folder(out_dir) as staging:
        folder = staging / "hf"
        merge_checkpoint(base, folder, source, adapter, weights, record.base_weights)
        checks = _check(model, record, folder, _has_effect(adapter))
        for file in folder.iterdir():
            file.rename(staging / file.name)
        folder.rmdir()
    return checks


def merge_checkpoint(
    base: Path,
    folder: Path,
    glm5: Glm5Config,
    adapter: LoraAdapter,
    weights: MergedWeights = "bf16",
    base_weights: BaseWeights = "dtype",
) -> None:
    """Writes `base` with the adapter merged to the new `folder`, tensor by tensor.

    base_weights: as the adapter was trained; with "fp8" what is not in float8 is quantised first.
    """
    left = set(adapter.factors) | set(adapter.modules)
    quantised = _quantised_for_training(base, glm5) if base_weights == "fp8" else set()
    block = BLOCK if glm5.fp8 is None else glm5.fp8.weight_block_size

    def rounded(name: str, weight: Tensor) -> Tensor:
        if name not in quantised:
            return weight
        return quantise(weight, block).dequantise(weight.dtype)

    def in_blocks(name: str, weight: Weight) -> Weight:
        if isinstance(weight, BlockScaled) or name not in quantised:
            return weight
        # what a release itself keeps in its dtype stays so
        return quantise(weight, block) if glm5.fp8 is None else rounded(name, weight)

    def change[W: (Tensor, Weight)](name: str, weight: W) -> W:
        linear = name.removesuffix(".weight")
        left.difference_update((name, linear))
        if name in adapter.modules:
            module = adapter.modules[name]
            return module if isinstance(weight, BlockScaled) else module.to(weight.dtype)
        return merge(weight, adapter.factors[linear]) if linear in adapter.factors else weight

    if weights == "fp8":
        rewrite_as_fp8(base, folder, glm5, lambda name, w: change(name, in_blocks(name, w)))
    else:
        rewrite_checkpoint(base, folder, glm5, lambda name, w: change(name, rounded(name, w)))
    assert not left, f"not merged: {left}"


def merge[W: (Tensor, BlockScaled, Weight)](weight: W, factors: LoraFactors) -> W:
    """weight [out, in] + scale * b @ a, in fp32, rounded once as the weight is stored.

    In float8 the blocks that change get a new scale, and the others stay as they are.
    """
    delta = factors.scale * (factors.b.float() @ factors.a.float())
    if isinstance(weight, BlockScaled):
        return add_to_blocks(weight, delta.to(weight.values.device))
    return (weight.float() + delta.to(weight.device)).to(weight.dtype)


def _quantised_for_training(base: Path, glm5: Glm5Config) -> set[str]:
    """What `base_weights` "fp8" makes float8 of, and the folder does not hold so."""
    with open_checkpoint(base, glm5) as reader:
        names = quantisable_names(glm5)
        if isinstance(reader, Fp8DequantReader):
            return {name for name in names if not reader.is_block_scaled(name)}
        return names


def _has_effect(adapter: LoraAdapter) -> bool:
    return bool(adapter.modules) or any(bool(pair.b.any()) for pair in adapter.factors.values())


def _check(
    model: GPTModel, record: CheckpointRecord, folder: Path, has_effect: bool
) -> list[ExportCheck]:
    assert record.base is not None
    glm5 = Glm5Config.from_hf(folder)
    token_ids = probe_tokens(glm5)
    device = next(model.parameters()).device
    reference = load_reference(folder, glm5, device)
    merged, theirs = paired_logits(load_model(folder, dtype="float32"), reference, token_ids)
    checks = [check_logits("transformers on the merged folder", theirs, merged)]
    adapted, theirs = paired_logits(model, reference, token_ids)
    checks += as_it_is(glm5, reference, token_ids, merged)
    if glm5.fp8 is None and glm5.dtype == "float32":
        return [*checks, check_logits("merged against adapter", theirs, adapted)]
    # an adapter that was never updated has nothing to lose but the noise of two implementations
    untrained = load_model(record.base, dtype="float32", base_weights=record.base_weights)
    plain = mcore_logits(untrained, token_ids)
    lost = share_lost(theirs, adapted, plain) if has_effect else 0.0
    if not lost <= MAX_SHARE_LOST:
        raise _too_coarse(glm5, lost)
    return [*checks, ExportCheck("share of the adapter lost to rounding", lost, MAX_SHARE_LOST)]


def _too_coarse(glm5: Glm5Config, lost: float) -> CheckFailedError:
    finer = "" if glm5.fp8 is None else f"with --weights bf16 ({glm5.dtype}), or "
    return CheckFailedError(
        f"{glm5.dtype if glm5.fp8 is None else 'float8'} is too coarse to hold this adapter",
        got=f"{lost:.0%} of its effect on the logits would be rounded away",
        expected=f"at most {MAX_SHARE_LOST:.0%}",
        remedy=f"export it {finer}with --as adapter",
    )
