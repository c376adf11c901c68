"""Runs a model on tokens: the one way from token ids to logits."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def packed_seq_params(cu_seqlens: Tensor) -> PackedSeqParams:
    """Megatron's description of packed documents; cu_seqlens [n + 1] int32 on the model's device."""
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def logits(model: GPTModel, token_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Next-token logits of packed documents that never see each other.

    token_ids [t] integer; cu_seqlens [n + 1] integer, document i is [cu_seqlens[i], cu_seqlens[i+1]),
    default one document; returns [t, vocab_size] in the model's dtype, differentiable unless under
    torch.no_grad().

    Raises:
        ValueError: token_ids is not one row, or cu_seqlens does not span it.
    """
    if token_ids.dim() != 1:
        raise ValueError(
            f"token_ids must be one row [t], got shape {tuple(token_ids.shape)}; "
            "pack several documents end to end and pass cu_seqlens"
        )
    device = next(model.parameters()).device
    token_ids = token_ids.to(device=device, dtype=torch.long)
    num_tokens = token_ids.numel()
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, num_tokens])
    _check_span(cu_seqlens, num_tokens)
    out = model(
        input_ids=token_ids[None],
        position_ids=torch.arange(num_tokens, device=device)[None],
        attention_mask=None,
        packed_seq_params=packed_seq_params(cu_seqlens.to(device=device, dtype=torch.int32)),
    )
    return out[0]


def _check_span(cu_seqlens: Tensor, num_tokens: int) -> None:
    bounds = cu_seqlens.tolist()
    rising = all(a <= b for a, b in zip(bounds, bounds[1:], strict=False))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {num_tokens} tokens given, got {bounds[:8]}"
        )
