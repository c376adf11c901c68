"""What processes do that are given bad input, or of which one dies."""

import os
import time
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from glm5.errors import Glm5Error
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from glm5.train.batches import context_share
from tests.parallel.jobs import SEQ_LENGTH, Job, numbers, resume, save


@dataclass(frozen=True)
class Refusal:
    """One bad input; one of the fields says which."""

    name: str
    layout: Layout | None = None
    """To be started on."""
    load: Job | None = None
    """To be resumed."""
    odd_row: Layout | None = None
    """Whose context-parallel ranks are to share a row of odd length."""

    def try_it(self) -> None:
        ensure_distributed(default_device(), self.layout or self.odd_row or Layout())
        if self.load is not None:
            resume(self.load, 3)
        if self.odd_row is not None:
            context_share(torch.arange(SEQ_LENGTH))


def refusals(cases: list[Refusal]) -> dict[str, str]:
    """What each case says, by its name; nothing for one that is accepted."""
    messages = {}
    for case in cases:
        try:
            case.try_it()
        except Glm5Error as error:
            messages[case.name] = str(error)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    return messages


def hang_while_saving(job: Job, step: int, timeout_minutes: float) -> str:
    """Takes a step and saves; rank 1 does nothing instead of writing. Rank 0's message."""
    ensure_distributed(default_device(), job.layout, timeout_minutes=timeout_minutes)
    loop = resume(job, step)
    numbers(loop._step(step + 1))
    if parallel_state.get_data_parallel_rank() == 1:
        time.sleep(600)
    try:
        save(job, loop, step + 1)
    except Glm5Error as error:
        return str(error)
    return ""


def die_while_saving(job: Job, step: int) -> str:
    """Takes a step and saves; rank 1 ends before it has written anything. Rank 0's message."""
    loop = resume(job, step)
    numbers(loop._step(step + 1))
    if parallel_state.get_data_parallel_rank() == 1:
        os._exit(3)
    try:
        save(job, loop, step + 1)
    except Glm5Error as error:
        return str(error)
    return ""
