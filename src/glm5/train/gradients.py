"""How Megatron's schedules scale the loss of a run and finish its gradients."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from glm5.lora.gradients import sum_expert_gradients
from glm5.train.state import TrainState


def connect(state: TrainState) -> None:
    """Tells Megatron's schedules how this run scales its loss and finishes its gradients."""
    config = state.chunks[0].module.config
    config.finalize_model_grads_func = finalize_gradients
    config.grad_scale_func = state.optimizer.scale_loss
    no_syncs = [chunk.no_sync for chunk in state.chunks]
    config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]


def zero_gradients(state: TrainState) -> None:
    """Before the first micro-batch of an update."""
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def finalize_gradients(model: list[DistributedDataParallel], *args: Any, **kwargs: Any) -> None:
    """Megatron's sums over ranks, and those that only adapters need."""
    finalize_model_grads(model, *args, **kwargs)
    for chunk in model:
        sum_expert_gradients(chunk)
