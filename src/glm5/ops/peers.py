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

from glm5.ops.indexer.inputs import check_index_inputs
from glm5.ops.indexer.selection import select_from_scores
from glm5.ops.indexer_kl.inputs import SumOverRanks, check_dense_inputs, check_sparse_inputs
from glm5.ops.indexer_kl.mcore import kl_per_row
from glm5.ops.key_sets import Chunk, KeyBounds, KeySelection
from glm5.ops.precision import no_autocast
from glm5.ops.sparse_mla.chunk import masked_logits, probabilities_
from glm5.ops.sparse_mla.inputs import attend_to_nothing, check_inputs

__all__ = ["indexer_kl", "indexer_kl_dense", "select_topk", "sparse_mla", "sparse_mla_with_mass"]

_ALL_ROWS = 2**31


@torch.no_grad()
def select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """Select by Megatron-Core's index scores, with the tie rule of select_from_scores.

    q [t_q, h_i, d_i], k [t_k, d_i] any float dtype, weights [t_q, h_i] fp32, starts, ends [t_q]
    int32 -> topk_indices [t_q, topk] int32, ascending key position, -1 only at the tail; an empty
    row is all -1. Computed in fp32.
    Raises BackendError for inputs that do not fit and for bounds outside the keys.
    """
    check_index_inputs(q, k, weights, starts, ends, topk)
    _check_keys(KeyBounds(starts, ends), k)
    return select_from_scores(_index_scores(q, k, weights), starts, ends, topk)


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
    Raises BackendError for inputs that do not fit and for indices beyond kv.
    """
    del deterministic
    check_inputs(q, kv, topk_indices, d_v)
    _check_keys(KeySelection(topk_indices), kv)
    t_q, t_k = len(q), len(kv)
    if t_q == 0 or t_k == 0 or topk_indices.shape[1] == 0:
        # Megatron-Core's softmax cannot reduce an empty dimension.
        return attend_to_nothing(q, kv, d_v)
    with no_autocast(q):
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


def sparse_mla_with_mass(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """As sparse_mla, and -> mass [t_q, topk] fp32 without gradient: the attention over all heads.

    Megatron-Core does not give its probabilities away: the logits are computed again for them, as
    for lse.
    """
    out, lse = sparse_mla(q, kv, topk_indices, softmax_scale, d_v, deterministic=deterministic)
    if len(q) == 0 or len(kv) == 0 or topk_indices.shape[1] == 0:
        return out, lse, torch.zeros(topk_indices.shape, device=q.device)
    everything, selection = _everything(q, kv), KeySelection(topk_indices)
    mass = _mass(q, kv, lse, softmax_scale, selection.mask(everything))
    return out, lse, selection.by_entry(mass, everything)


@torch.no_grad()
def _log_sum_exp(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float) -> Tensor:
    mask = KeySelection(topk_indices).mask(_everything(q, kv))
    with no_autocast(q):
        return masked_logits(q.float() * softmax_scale, kv.float(), mask).logsumexp(-1)


@torch.no_grad()
def _mass(q: Tensor, kv: Tensor, lse: Tensor, softmax_scale: float, mask: Tensor) -> Tensor:
    """[t_q, t_k] fp32: the probabilities of the masked keys, summed over the heads."""
    with no_autocast(q):
        logits = masked_logits(q.float() * softmax_scale, kv.float(), mask)
    return probabilities_(logits, lse.float()).sum(1)


def indexer_kl(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, topk_indices: Tensor, mass: Tensor
) -> Tensor:
    """KL(p || softmax(index scores)) over topk_indices by Megatron-Core's scores and KL formula.

    Tensors as in the reference. Megatron-Core raises p to at least 1e-10 inside its logarithm.
    Computed in fp32, differentiable in the index tensors by plain autograd.
    Raises BackendError for inputs that do not fit and for indices beyond index_k.
    """
    check_sparse_inputs(index_q, index_k, index_weights, topk_indices, mass)
    everything, selection = _everything(index_q, index_k), KeySelection(topk_indices)
    _check_keys(selection, index_k)
    target = selection.by_key(mass.detach().float(), everything)
    scores = _index_scores(index_q, index_k, index_weights)
    return kl_per_row(target, scores, selection.mask(everything))


def indexer_kl_dense(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    softmax_scale: float,
    starts: Tensor,
    ends: Tensor,
    *,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """As indexer_kl over all keys in [starts, ends), with the attention to them computed here.

    Tensors as in the reference. Raises BackendError for inputs that do not fit and for bounds
    beyond the keys.
    """
    check_dense_inputs(index_q, index_k, index_weights, q, kv, lse, starts, ends)
    bounds = KeyBounds(starts, ends)
    _check_keys(bounds, kv)
    mask = bounds.mask(_everything(q, kv))
    target = _mass(q, kv, lse, softmax_scale, mask)
    if sum_over_ranks is not None:
        sum_over_ranks(target)
    return kl_per_row(target, _index_scores(index_q, index_k, index_weights), mask)


def _index_scores(index_q: Tensor, index_k: Tensor, index_weights: Tensor) -> Tensor:
    """[t_q, t_k] fp32."""
    with no_autocast(index_q):
        # Megatron-Core's layout is [tokens, batch, ...]; flat tokens are a batch of one.
        scores: Tensor = _compute_index_scores(
            index_q[:, None], index_weights[:, None], index_k[:, None]
        )[0]
    return scores


def _check_keys(keys: KeyBounds | KeySelection, k: Tensor) -> None:
    """Raise BackendError where a row refers to keys that do not exist; one host sync."""
    # Chunks are made of checked rows alone; Megatron-Core's scatter would end the CUDA context.
    keys.chunks(len(k), _ALL_ROWS)


def _everything(q: Tensor, k: Tensor) -> Chunk:
    return Chunk(slice(0, len(q)), slice(0, len(k)))
