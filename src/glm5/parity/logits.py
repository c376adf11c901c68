"""Compares the logits of two models of one checkpoint on the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.config import Glm5Config
from glm5.model.forward import logits
from glm5.parity.pair import observe_pair
from glm5.parity.tokens import draw_tokens


def probe_tokens(glm5: Glm5Config, *, seed: int = 0) -> Tensor:
    """One document, long enough that every query of its second half must choose keys."""
    count = 3 * glm5.index_topk + 5
    return draw_tokens(glm5, count, torch.Generator().manual_seed(seed))


@torch.no_grad()
def mcore_logits(model: GPTModel, token_ids: Tensor) -> Tensor:
    """[t, vocab] fp32 on the CPU, of a glm5 model."""
    return logits(model, token_ids).float().cpu()


@torch.no_grad()
def paired_logits(model: GPTModel, reference: Any, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """([t, vocab], [t, vocab]) fp32 on the CPU, of a glm5 and a `transformers` model.

    `transformers` runs on our selection as far as its own choice differs by ties alone.
    """
    device = next(model.parameters()).device
    token_ids = token_ids.to(device)
    pair = observe_pair(model, reference, token_ids, [token_ids.numel()], gradients=False)
    return pair.ours.logits.float().cpu(), pair.theirs.logits.float().cpu()
