"""Supervised fine-tuning step by step: a batch, its gradients, an update, an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from glm5.errors import ConfigError
from glm5.lora.dropout import seed_masks
from glm5.train.batches import BatchShaper, micro_batches_together
from glm5.train.gradients import connect, zero_gradients
from glm5.train.packing import BatchOrder, PackedDataset
from glm5.train.run_config import TrainSection
from glm5.train.sft import forward_step
from glm5.train.state import TrainState
from glm5.train.steps import StepLoop, Values, is_due


@dataclass(frozen=True)
class LossSum:
    """Loss summed over trained tokens, and how many there were, over all ranks."""

    loss_sum: float
    num_tokens: int

    @property
    def mean(self) -> float:
        return self.loss_sum / self.num_tokens if self.num_tokens else math.nan


class TrainLoop(StepLoop):
    """Steps over packed rows: one batch and one update of the optimizer each."""

    section: TrainSection

    def __init__(
        self,
        state: TrainState,
        train_data: PackedDataset,
        eval_data: PackedDataset | None,
        section: TrainSection,
        *,
        shuffle: bool,
    ) -> None:
        self.state = state
        self.train_data = train_data
        self.eval_data = eval_data
        self.section = section
        glm5 = state.chunks[0].module.config.glm5
        self.pad_token_id = glm5.eos_token_id[0] if glm5.pad_token_id is None else glm5.pad_token_id
        self.order = BatchOrder(len(train_data), section.global_batch_size, section.seed, shuffle)
        self.forward_backward = get_forward_backward_func()
        self._check_batch()
        connect(state)

    @torch.no_grad()
    def evaluate(self, data: PackedDataset) -> LossSum:
        """Mean loss over all rows of `data`, without gradients."""
        for chunk in self.state.chunks:
            chunk.eval()
        shaper = BatchShaper(data, 1, self.pad_token_id)
        reports = self._forward(shaper, range(len(data)), forward_only=True)
        for chunk in self.state.chunks:
            chunk.train()
        return _sum_reports(reports, _device(self.state))

    def _eval_values(self, step: int, finished: bool) -> Values:
        if self.eval_data is None or not is_due(step, self.section.eval_every, finished):
            return {}
        found = self.evaluate(self.eval_data)
        return {"eval_loss": found.mean} if found.num_tokens else {}

    def _step(self, step: int) -> Values:
        started = time.perf_counter()
        state = self.state
        zero_gradients(state)
        seed_masks(self.section.seed, step)
        rows = self.order.rows(step - 1)
        shaper = BatchShaper(self.train_data, self.section.micro_batch_size, self.pad_token_id)
        reports = self._forward(shaper, rows)
        _, grad_norm, _ = state.optimizer.step()
        lr = state.optimizer.param_groups[0]["lr"]
        state.scheduler.step(increment=1)
        total = _sum_reports(reports, _device(state))
        seconds = time.perf_counter() - started
        num_tokens = sum(self.train_data[row].num_tokens for row in rows)
        return {
            "loss": total.mean,
            "grad_norm": float(grad_norm),
            "lr": lr,
            "trained_tokens": total.num_tokens,
            "tokens": num_tokens,
            "step_seconds": seconds,
        }

    def _forward(
        self, shaper: BatchShaper, rows: Sequence[int], *, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """What the last pipeline stage reports of every micro-batch; nothing on other stages."""
        shares, chunks = shaper.share(rows), self.state.chunks
        return self.forward_backward(
            forward_step_func=forward_step,
            # every stage sees all micro-batches, also where a rank has several
            data_iterator=[shaper.micro_batches(shares) for _ in chunks],
            model=chunks,
            num_microbatches=len(shares),
            # the shapes that pipeline stages exchange
            seq_length=shaper.capacity,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _check_batch(self) -> None:
        ranks = parallel_state.get_data_parallel_world_size()
        together = micro_batches_together()
        per_step = self.section.micro_batch_size * ranks * together
        if self.section.global_batch_size % per_step:
            raise ConfigError(
                "the batch does not divide over the ranks",
                got=f"global_batch_size {self.section.global_batch_size}, micro_batch_size "
                f"{self.section.micro_batch_size}, {ranks} data-parallel ranks, micro-batches in "
                f"groups of {together}",
                expected=f"a multiple of {per_step}",
                remedy="change train.global_batch_size",
            )


def _sum_reports(reports: Sequence[dict[str, Tensor]], device: torch.device) -> LossSum:
    """Adds up micro-batches and ranks: the one host sync of a step besides the gradient norm's."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for report in reports:
        sums += torch.stack([report["loss_sum"].double(), report["num_tokens"].double()])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # only the last pipeline stage has a loss
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    loss_sum, num_tokens = sums.tolist()
    return LossSum(loss_sum, int(num_tokens))


def _device(state: TrainState) -> torch.device:
    return next(state.chunks[0].parameters()).device
