"""The training loop: steps, metrics, evaluation, checkpoints, and a clean stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from glm5.errors import ConfigError, DivergedError
from glm5.lora.dropout import seed_masks
from glm5.lora.gradients import sum_expert_gradients
from glm5.train.batches import BatchShaper, micro_batches_together
from glm5.train.metrics import MetricsLog
from glm5.train.packing import BatchOrder, PackedDataset
from glm5.train.run_config import TrainSection
from glm5.train.sft import forward_step
from glm5.train.state import TrainState
from glm5.train.stop import StopRequest


@dataclass(frozen=True)
class LossSum:
    """Loss summed over trained tokens, and how many there were, over all ranks."""

    loss_sum: float
    num_tokens: int

    @property
    def mean(self) -> float:
        return self.loss_sum / self.num_tokens if self.num_tokens else math.nan


class TrainLoop:
    """Runs optimizer steps `first_step .. steps` (counted from 1)."""

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
        _connect(state)

    def run(
        self,
        first_step: int,
        log: MetricsLog | None,
        save: Callable[[int], Any],
        stop: StopRequest,
    ) -> int:
        """Trains until the last step or a stop; returns the last step taken, which is saved.

        Raises:
            DivergedError: a loss or gradient norm is NaN or infinite; nothing is saved after it.
        """
        window = _Window()
        for step in range(first_step, self.section.steps + 1):
            values = self._step(step)
            window.add(values)
            finished = step == self.section.steps
            diverged = not all(math.isfinite(values[name]) for name in ("loss", "grad_norm"))
            if self._due(step, self.section.eval_every, finished) and not diverged:
                values |= self._eval_values()
                # the loss of a step is from before its update, this one from after it
                diverged = not math.isfinite(values.get("eval_loss", 0.0))
            must_show = finished or diverged or "eval_loss" in values
            if log is not None and self._due(step, self.section.log_every, must_show):
                log.log(step, {**values, **window.close()})
            if diverged:
                raise _diverged(step, values)
            # a stop saves and logs nothing more, so that a resumed run logs what a whole one does
            last = finished or _any_rank(stop.asked_by is not None)
            if self._due(step, self.section.save_every, last):
                save(step)
            if last:
                return step
        return first_step - 1

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

    def _eval_values(self) -> dict[str, float]:
        found = LossSum(0.0, 0) if self.eval_data is None else self.evaluate(self.eval_data)
        return {"eval_loss": found.mean} if found.num_tokens else {}

    def _step(self, step: int) -> dict[str, float]:
        started = time.perf_counter()
        state = self.state
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
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

    @staticmethod
    def _due(step: int, every: int, last: bool) -> bool:
        return last or (every > 0 and step % every == 0)

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


class _Window:
    """Tokens per second over the steps between two lines of the log."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, values: dict[str, float]) -> None:
        self._tokens += values["tokens"]
        self._seconds += values["step_seconds"]

    def close(self) -> dict[str, float]:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        self._tokens = self._seconds = 0.0
        return {"tokens_per_second": rate}


def _connect(state: TrainState) -> None:
    """Tells Megatron's schedules how this run scales its loss and finishes its gradients."""
    config = state.chunks[0].module.config
    config.finalize_model_grads_func = finalize_gradients
    config.grad_scale_func = state.optimizer.scale_loss
    no_syncs = [chunk.no_sync for chunk in state.chunks]
    config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]


def finalize_gradients(model: list[DistributedDataParallel], *args: Any, **kwargs: Any) -> None:
    """Megatron's sums over ranks, and those that only adapters need."""
    finalize_model_grads(model, *args, **kwargs)
    for chunk in model:
        sum_expert_gradients(chunk)


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


def _any_rank(flag: bool) -> bool:
    """Ranks must stop at the same step, and a signal may reach only one of them."""
    if dist.get_world_size() == 1:
        return flag
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def _device(state: TrainState) -> torch.device:
    return next(state.chunks[0].parameters()).device


def _diverged(step: int, values: dict[str, float]) -> DivergedError:
    shown = ("loss", "grad_norm", "eval_loss")
    return DivergedError(
        f"training diverged at step {step}",
        got=", ".join(f"{name} {values[name]}" for name in shown if name in values),
        expected="finite numbers",
        remedy="train anew in another output.dir with a lower optimizer.lr or more warmup_steps; "
        "checkpoints of this run are from before this step, and may be damaged already",
    )
