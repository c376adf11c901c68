"""`glm5 export --as merged`: the base checkpoint with the adapters added to its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraAdapter, LoraFactors
from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.ckpt_dir import CheckpointRecord
from glm5.checkpoint.dequantise import rewrite_checkpoint
from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.load import load_model
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError
from glm5.export.check import ExportCheck, as_it_is, check_logits, share_lost
from glm5.export.factors import trained_adapter
from glm5.parity.hf_side import load_reference
from glm5.parity.logits import mcore_logits, paired_logits, probe_tokens

# Rounding to bf16 costs a small adapter some of its effect; past this the merge is pointless.
MAX_SHARE_LOST = 0.5


def export_merged(model: GPTModel, record: CheckpointRecord, out_dir: Path) -> list[ExportCheck]:
    """Writes W + scale * B A, summed in fp32 and rounded once to the base's dtype.

    Whole trained tensors (router, norms, embeddings, head) take the place of the base's, in its
    dtype. One tensor and the factors of one linear are in memory beside the model.

    Before the folder appears, `transformers` has loaded it and agrees with glm5 on the same folder,
    and with the adapted model as far as the rounding of the weights allows.

    Raises:
        CheckFailedError: other logits, or a dtype too coarse for the adapter.
    """
    assert record.lora is not None and record.base is not None
    glm5: Glm5Config = model.config.glm5
    base = hf_folder(record.base)
    adapter = trained_adapter(model, torch.float32)
    source = Glm5Config.from_hf(base).model_copy(update={"latent_norm_eps": glm5.latent_norm_eps})
    with new_folder(out_dir) as staging:
        folder = staging / "hf"
        merge_checkpoint(base, folder, source, adapter)
        checks = _check(model, base, folder, _has_effect(adapter))
        for file in folder.iterdir():
            file.rename(staging / file.name)
        folder.rmdir()
    return checks


def merge_checkpoint(base: Path, folder: Path, glm5: Glm5Config, adapter: LoraAdapter) -> None:
    """Writes `base` with the adapter merged to the new `folder`, tensor by tensor."""
    left = set(adapter.factors) | set(adapter.modules)

    def change(name: str, tensor: Tensor) -> Tensor:
        linear = name.removesuffix(".weight")
        left.difference_update((name, linear))
        if name in adapter.modules:
            return adapter.modules[name].to(tensor.device, tensor.dtype)
        return merge(tensor, adapter.factors[linear]) if linear in adapter.factors else tensor

    rewrite_checkpoint(base, folder, glm5, change)
    assert not left, f"not merged: {left}"


def merge(weight: Tensor, factors: LoraFactors) -> Tensor:
    """weight [out, in] + scale * b @ a, in fp32, rounded once to the dtype of weight."""
    delta = factors.b.float() @ factors.a.float()
    return (weight.float() + factors.scale * delta.to(weight.device)).to(weight.dtype)


def _has_effect(adapter: LoraAdapter) -> bool:
    return bool(adapter.modules) or any(bool(pair.b.any()) for pair in adapter.factors.values())


def _check(model: GPTModel, base: Path, folder: Path, has_effect: bool) -> list[ExportCheck]:
    glm5 = Glm5Config.from_hf(folder)
    token_ids = probe_tokens(glm5)
    device = next(model.parameters()).device
    reference = load_reference(folder, glm5, device)
    merged, theirs = paired_logits(load_model(folder, dtype="float32"), reference, token_ids)
    checks = [check_logits("transformers on the merged folder", theirs, merged)]
    adapted, theirs = paired_logits(model, reference, token_ids)
    checks += as_it_is(glm5, reference, token_ids, merged)
    if glm5.dtype == "float32":
        return [*checks, check_logits("merged against adapter", theirs, adapted)]
    # an adapter that was never updated has nothing to lose but the noise of two implementations
    plain = mcore_logits(load_model(base, dtype="float32"), token_ids)
    lost = share_lost(theirs, adapted, plain) if has_effect else 0.0
    if not lost <= MAX_SHARE_LOST:
        raise CheckFailedError(
            f"{glm5.dtype} is too coarse to hold this adapter",
            got=f"{lost:.0%} of its effect on the logits would be rounded away",
            expected=f"at most {MAX_SHARE_LOST:.0%}",
            remedy="export it with --as adapter",
        )
    return [*checks, ExportCheck("share of the adapter lost to rounding", lost, MAX_SHARE_LOST)]
