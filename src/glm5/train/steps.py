"""Steps of any kind of run: metrics, evaluation, checkpoints, and a clean stop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from glm5.errors import DivergedError, Glm5Error
from glm5.train.metrics import MetricsLog
from glm5.train.sections import LengthSection
from glm5.train.stop import StopRequest

Values = dict[str, float]


class StepLoop(ABC):
    """Runs steps `first_step .. steps` (counted from 1)."""

    section: LengthSection
    harmless: tuple[type[Glm5Error], ...] = ()
    """Errors of a step that come on all ranks alike, before it has changed anything."""

    @abstractmethod
    def _step(self, step: int) -> Values:
        """Takes one step; its metrics, with `tokens` and `step_seconds` among them."""

    def _eval_values(self, step: int, finished: bool) -> Values:
        """An evaluation after the step, if one is due; a run ends if `eval_loss` is no number."""
        del step, finished
        return {}

    def _labels(self) -> Mapping[str, str]:
        """Words that every line of the metrics carries."""
        return {}

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
            Glm5Error: a step failed; where that is harmless the steps before it are saved.
        """
        window, saved = _Window(), first_step - 1
        for step in range(first_step, self.section.steps + 1):
            try:
                values = self._step(step)
            except self.harmless:
                if saved < step - 1:
                    save(step - 1)
                raise
            window.add(values)
            finished = step == self.section.steps
            # a step that had nothing to learn from has neither
            diverged = not all(math.isfinite(values.get(n, 0.0)) for n in ("loss", "grad_norm"))
            if not diverged:
                values |= self._eval_values(step, finished)
                # the loss of a step is from before its update, this one from after it
                diverged = not math.isfinite(values.get("eval_loss", 0.0))
            must_show = finished or diverged or "eval_loss" in values
            if log is not None and is_due(step, self.section.log_every, must_show):
                log.log(step, {**values, **window.close(), **self._labels()})
            if diverged:
                raise _diverged(step, values)
            # a stop saves and logs nothing more, so that a resumed run logs what a whole one does
            last = finished or _any_rank(stop.asked_by is not None)
            if is_due(step, self.section.save_every, last):
                save(step)
                saved = step
            if last:
                return step
        return first_step - 1


def is_due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens after every so many steps, and after the last, does now."""
    return last or (every > 0 and step % every == 0)


class _Window:
    """Tokens per second over the steps between two lines of the log."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, values: Values) -> None:
        self._tokens += values["tokens"]
        self._seconds += values["step_seconds"]

    def close(self) -> Values:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        self._tokens = self._seconds = 0.0
        return {"tokens_per_second": rate}


def _any_rank(flag: bool) -> bool:
    """Ranks must stop at the same step, and a signal may reach only one of them."""
    if dist.get_world_size() == 1:
        return flag
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def _diverged(step: int, values: Values) -> DivergedError:
    shown = ("loss", "grad_norm", "eval_loss")
    return DivergedError(
        f"training diverged at step {step}",
        got=", ".join(f"{name} {values[name]}" for name in shown if name in values),
        expected="finite numbers",
        remedy="train anew in another output.dir with a lower optimizer.lr or more warmup_steps; "
        "checkpoints of this run are from before this step, and may be damaged already",
    )
