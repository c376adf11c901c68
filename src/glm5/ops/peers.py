"""Backend "megatron": Megatron-Core's own unfused DSA functions, as a second opinion.

It makes [h_i, t_q, t_k] and [h, t_q, t_k] tensors: memory grows with the square of the sequence
length, so it serves to check results on short sequences, not to train.
"""

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    _compute_index_scores,
    _unfused_absorbed_dsa_fn,
)
from torch import Tensor

from glm5.ops.indexer.selection import select_from_scores
from glm5.ops.indexer_kl.inputs import SumOverRanks, check_inputs, check_key_set
from glm5.ops.indexer_kl.mcore import kl_per_row
from glm5.ops.key_sets import Chunk, KeyBounds, KeySelection
from glm5.ops.sparse_mla.chunk import masked_logits, probabilities_
from glm5.ops.sparse_mla.inputs import attend_to_nothing

__all__ = ["indexer_kl", "select_topk", "sparse_mla"]


@torch.no_grad()
def select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """Select by Megatron-Core's index scores, with the tie rule of select_from_scores.

    q [t_q, h_i, d_i], k [t_k, d_i] any float dtype, weights [t_q, h_i] fp32, starts, ends [t_q]
    int32 -> topk_indices [t_q, topk] int32, ascending key position, -1 only at the tail; an empty
    row is all -1. Always computed in fp32.
    """
    # Megatron-Core's layout is [tokens, batch, ...]; flat tokens are a batch of one.
    scores = _compute_index_scores(q[:, None], weights[:, None], k[:, None])
    return select_from_scores(scores[0], starts, ends, topk)


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over selected keys by Megatron-Core, whose probabilities are cast to kv's dtype.

    q [t_q, h, d_qk], kv [t_k, d_qk] one float dtype, topk_indices [t_q, topk] int32, -1 = none
    -> out [t_q, h, d_v] in kv's dtype, lse [t_q, h] fp32 natural log, without gradient.
    A row of all -1 gives out = 0, lse = -inf. Differentiable in q and kv by plain autograd of dense
    products, which give the same bits every time, deterministic or not.
    """
    del deterministic
    t_q, t_k = len(q), len(kv)
    if t_q == 0 or t_k == 0 or topk_indices.shape[1] == 0:
        # Megatron-Core's softmax cannot reduce an empty dimension.
        return attend_to_nothing(q, kv, d_v)
    out = _unfused_absorbed_dsa_fn(
        q[:, None],
        kv[:, None, None],
        topk_indices[None],
        softmax_scale,
        d_v,
        # The selection alone is the mask: without bounds Megatron-Core would add a causal one.
        varlen_starts=torch.zeros(t_q, dtype=torch.int32, device=q.device),
        varlen_ends=torch.full((t_q,), t_k, dtype=torch.int32, device=q.device),
    )
    return out[:, 0], _log_sum_exp(q, kv, topk_indices, softmax_scale)


@torch.no_grad()
def _log_sum_exp(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float) -> Tensor:
    mask = KeySelection(topk_indices).mask(Chunk(slice(0, len(q)), slice(0, len(kv))))
    return masked_logits(q.float() * softmax_scale, kv.float(), mask).logsumexp(-1)


def indexer_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    softmax_scale: float,
    *,
    topk_indices: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """KL(p || softmax(index scores)) by Megatron-Core's index scores and its KL formula.

    Tensors and key sets as in the reference. Megatron-Core raises p to at least 1e-10 inside its
    logarithm. Computed in fp32, differentiable in the index tensors by plain autograd.
    Raises BackendError when not exactly one key set is given, or when the shapes do not fit.
    """
    check_inputs(index_q, index_k, index_weights, q, kv, lse)
    check_key_set(topk_indices, starts, ends, t_q=len(q))
    everything = Chunk(slice(0, len(q)), slice(0, len(kv)))
    if topk_indices is not None:
        mask = KeySelection(topk_indices).mask(everything)
    else:
        assert starts is not None and ends is not None, "check_key_set saw neither key set"
        mask = KeyBounds(starts, ends).mask(everything)
    with torch.no_grad():
        logits = masked_logits(q.float() * softmax_scale, kv.float(), mask)
        target = probabilities_(logits, lse.float()).sum(1)
        if sum_over_ranks is not None:
            sum_over_ranks(target)
    scores = _compute_index_scores(index_q[:, None], index_weights[:, None], index_k[:, None])[0]
    return kl_per_row(target, scores, mask)
