"""Joins the indexer's KL loss to the main loss without passing through the layers above."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from glm5.model.indexer import IndexInputs
from glm5.model.parallel import tp_sum
from glm5.ops.backends import Backend


def add_indexer_loss(
    backend: Backend,
    output: Tensor,
    index_inputs: IndexInputs,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    topk_indices: Tensor,
    *,
    softmax_scale: float,
    coeff: float,
) -> Tensor:
    """Returns `output` unchanged; its backward also sends coeff * sum_t KL_t to the indexer.

    The sum runs over all tokens of the micro-batch, as the main loss does before the trainer
    divides both by the number of trained tokens. q [t, h / tp, d_qk], kv [t_k, d_qk] and
    lse [t, h / tp] are constants; topk_indices [t, topk] int32: the KL is over the selected keys
    (arXiv 2512.02556, eq. 4). Every tensor-parallel rank computes the loss of all its tokens, with
    the attention of all heads.
    """
    kl = backend.indexer_kl(
        index_inputs.q,
        index_inputs.k,
        index_inputs.weights,
        q,
        kv,
        lse,
        softmax_scale,
        topk_indices=topk_indices,
        sum_over_ranks=tp_sum(),
    )
    if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        # a backward pass outside of a schedule would make one that no schedule can copy into
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=output.device))
    # Megatron's schedules set this scaler to the scale of the main loss
    return MoEAuxLossAutoScaler.apply(output, coeff * kl.sum())
