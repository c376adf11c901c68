"""How much each token's loss counts, so that its sum does not depend on how a step is cut up."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Normalise = Literal["token", "sequence"]


def loss_weights(mask: Tensor, cu_seqlens: Tensor, normalise: Normalise) -> tuple[Tensor, Tensor]:
    """(weights [t] fp32, counts [t] int32) of the tokens of a whole packed row.

    mask [t] bool, True where the label is a response token; document i is
    [cu_seqlens[i], cu_seqlens[i + 1]).

    The loss of an optimizer step is sum(weights * losses) / sum(counts), both over all tokens of
    all micro-batches and ranks: exactly what Megatron makes of a forward step that returns
    `weighted_sum`. So micro-batches, data-parallel ranks and shares of context-parallel ranks
    may be cut anywhere, after this function has seen the whole row.

    token: every response token weighs 1, and there are as many as response tokens. sequence: a
    token weighs 1 / (response tokens of its document), and each document is counted once, at its
    first response token; padding documents have none, and do not count.
    """
    weights = mask.to(torch.float32)
    if normalise == "token":
        return weights, mask.to(torch.int32)
    lengths = cu_seqlens.diff().long()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    responses = torch.zeros_like(lengths).index_add(0, document, mask.long())
    weights = weights / responses.clamp(min=1)[document]
    # response tokens up to and with each token; those of earlier documents come off
    seen = mask.long().cumsum(0)
    before = torch.cat([seen.new_zeros(1), seen])[cu_seqlens.long()[:-1]][document]
    return weights, (mask & (seen - before == 1)).to(torch.int32)


def weighted_sum(losses: Tensor, weights: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(loss summed, a scalar with gradient; count, int32) of this rank's part of a micro-batch.

    losses [t] fp32, 0 where masked; Megatron adds both up and divides the gradients by the count.
    """
    return (losses * weights).sum(), counts.sum().to(torch.int32)
