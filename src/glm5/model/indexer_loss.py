"""Joins the indexer's KL loss to the main loss without passing through the layers above."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from glm5.model.indexer import IndexInputs
from glm5.ops.backends import Backend


def add_indexer_loss(
    backend: Backend,
    output: Tensor,
    index_inputs: IndexInputs,
    topk_indices: Tensor,
    mass: Tensor,
    *,
    coeff: float,
) -> Tensor:
    """Returns `output` unchanged; its backward also sends coeff * sum_t KL_t to the indexer.

    The sum runs over all tokens of the micro-batch, as the main loss does before the trainer
    divides both by the number of trained tokens. topk_indices [t, topk] int32: the KL is over the
    selected keys (arXiv 2512.02556, eq. 4); mass [t, topk] fp32, a constant, is the attention to
    them of all heads. Ranks that have h / tp heads for all queries compute the whole loss each.
    """
    kl = backend.indexer_kl(
        index_inputs.q, index_inputs.k, index_inputs.weights, topk_indices, mass
    )
    if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        # a backward pass outside of a schedule would make one that no schedule can copy into
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=output.device))
    # Megatron's schedules set this scaler to the scale of the main loss
    return MoEAuxLossAutoScaler.apply(output, coeff * kl.sum())
