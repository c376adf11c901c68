"""Supervised fine-tuning: one packed micro-batch forward, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm5.model.forward import packed_seq_params
from glm5.train.packing import PackedRow

# loss summed over trained tokens, number of trained tokens, what the step reports
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]


def forward_step(
    data_iterator: Iterator[PackedRow], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], LossResult]]:
    """Megatron's forward_step_func: losses [1, t] of the next micro-batch, and their sum."""
    device = next(model.parameters()).device
    row = next(data_iterator)
    losses = model(
        input_ids=_to(row.input_ids, device)[None],
        position_ids=torch.arange(row.num_tokens, device=device)[None],
        attention_mask=None,
        labels=_to(row.labels, device)[None],
        packed_seq_params=packed_seq_params(_to(row.cu_seqlens, device)),
        loss_mask=_to(row.loss_mask, device)[None],
    )
    return losses, partial(reduce_loss, _to(row.loss_mask, device))


def reduce_loss(loss_mask: Tensor, losses: Tensor) -> LossResult:
    """Sum over the assistant's tokens; Megatron divides the gradients by the batch's token count.

    loss_mask [t] fp32; losses [1, t] fp32.
    """
    loss_sum = (losses.float().flatten() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    report: dict[str, Any] = {"loss_sum": loss_sum.detach(), "num_tokens": num_tokens}
    return loss_sum, num_tokens, report


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
