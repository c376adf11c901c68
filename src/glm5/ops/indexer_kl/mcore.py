"""Megatron-Core's formula of the indexer's loss."""

from megatron.core.transformer.experimental_attention_variant.dsa_indexer_loss import (
    indexer_kl_per_row,
    normalize_indexer_target,
)
from megatron.core.transformer.experimental_attention_variant.dsa_masking import (
    masked_log_softmax,
)
from torch import Tensor


def kl_per_row(mass: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """sum_n p log(max(p, 1e-10) / softmax(scores)) over the masked places, p = mass / sum(mass).

    mass, scores [t_q, n] fp32, mask [t_q, n] bool -> [t_q] fp32, differentiable in the scores.
    """
    log_probs = masked_log_softmax(scores, mask, dim=-1)
    kl: Tensor = indexer_kl_per_row(normalize_indexer_target(mass), log_probs, mask)
    return kl
