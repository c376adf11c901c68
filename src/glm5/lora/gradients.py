"""Gradients of adapters that Megatron does not finish by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from glm5.lora.attach import adapted_modules
from glm5.lora.experts import GroupedLora


@torch.no_grad()
def sum_expert_gradients(model: nn.Module) -> None:
    """Adds up what expert-tensor-parallel ranks made of a whole factor's gradient; collective.

    Of a cut linear B A one factor is cut and the other whole: with y_r = B_r A x on rank r,
    dL/dA = sum_r B_r^T dL/dy_r x^T. Megatron sums such parts over tensor-parallel ranks alone,
    which for experts are other ranks.
    """
    group = parallel_state.get_expert_tensor_parallel_group()
    parts = list(_parts(model)) if group.size() > 1 else []
    if not parts:
        return
    # one message for all experts of all layers
    together = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(together, group=group)
    for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


def _parts(model: nn.Module) -> Iterator[Tensor]:
    for _, adapted in adapted_modules(model):
        if isinstance(adapted, GroupedLora):
            for factor in adapted.partial_factors():
                # Megatron's gradient buffer
                yield cast(Any, factor).main_grad
