"""Tokens for a comparison of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.config import Glm5Config


def draw_tokens(glm5: Glm5Config, count: int, generator: torch.Generator) -> Tensor:
    """[count] int64: any token but padding, whose embedding gradient transformers discards."""
    if glm5.pad_token_id is None:
        return torch.randint(glm5.vocab_size, (count,), generator=generator)
    token_ids = torch.randint(glm5.vocab_size - 1, (count,), generator=generator)
    return token_ids + (token_ids >= glm5.pad_token_id)
