"""Supervised fine-tuning: one packed micro-batch forward, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm5.model.forward import packed_documents
from glm5.train.batches import context_share
from glm5.train.packing import PackedRow

# loss summed over trained tokens, number of trained tokens, what the step reports
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]


def forward_step(
    data_iterator: Iterator[PackedRow], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], LossResult]]:
    """Megatron's forward_step_func: losses [1, t] of the next micro-batch, and their sum."""
    device = next(model.parameters()).device
    row = next(data_iterator)
    input_ids, labels, loss_mask = (
        context_share(tensor).to(device, non_blocking=True)
        for tensor in (row.input_ids, row.labels, row.loss_mask)
    )
    losses = model(
        input_ids=input_ids[None],
        position_ids=torch.arange(input_ids.numel(), device=device)[None],
        attention_mask=None,
        labels=labels[None],
        # the documents of the whole row: keys come from all context-parallel ranks
        packed_seq_params=packed_documents(row.cu_seqlens, device),
        loss_mask=loss_mask[None],
    )
    return losses, partial(reduce_loss, loss_mask)


def reduce_loss(loss_mask: Tensor, losses: Tensor) -> LossResult:
    """Sum over the assistant's tokens; Megatron divides the gradients by the batch's token count.

    loss_mask [t] fp32; losses [1, t] fp32.
    """
    loss_sum = (losses.float().flatten() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    report: dict[str, Any] = {"loss_sum": loss_sum.detach(), "num_tokens": num_tokens}
    return loss_sum, num_tokens, report
