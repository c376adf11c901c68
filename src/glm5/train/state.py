"""Saves and restores a run: weights that train, optimiser and schedule, in one atomic folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed import DistError

from glm5.checkpoint.atomic import new_folder, remove_folder
from glm5.checkpoint.ckpt_dir import (
    HF_FOLDER,
    MCORE_FOLDER,
    CheckpointRecord,
    saved_steps,
    step_folder,
    write_record,
)
from glm5.checkpoint.hf_files import copy_small_files
from glm5.checkpoint.megatron_io import load_sharded, save_sharded
from glm5.checkpoint.trained import load_trained, sharded_trained
from glm5.errors import CheckpointError
from glm5.train.optimizer_state import load_optimizer, sharded_optimizer

# gloo has no error class of its own
_CONNECTION = re.compile(r"gloo|[Cc]onnection|[Tt]imed? ?out")


class TrainState:
    """What a run must find again to go on bit for bit; the data order is a function of the step.

    `chunks` are this rank's pipeline stages: one, or several if they are interleaved.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.scheduler = scheduler

    def save(self, run_dir: Path, record: CheckpointRecord, hf_dir: Path, keep: int) -> Path:
        """Writes the checkpoint of `record.step`, then removes all but the newest `keep`."""
        target = step_folder(run_dir, record.step)
        with _folder_of_all_ranks(target) as staging:
            if is_writer():
                write_record(staging, record)
                copy_small_files(hf_dir, staging / HF_FOLDER)
            save_sharded(staging / MCORE_FOLDER, self._sharded(is_loading=False))
        if is_writer():
            for step in saved_steps(run_dir)[:-keep]:
                remove_folder(step_folder(run_dir, step))
        return target

    def load(self, checkpoint: Path) -> None:
        """Restores weights, optimiser and schedule in place.

        Raises:
            CheckpointError: the checkpoint is damaged or of another model.
        """
        loaded = load_sharded(checkpoint / MCORE_FOLDER, self._sharded(is_loading=True))
        for number, chunk in enumerate(self.chunks):
            load_trained(chunk.module, loaded["model"][number])
        self.scheduler.load_state_dict(loaded["scheduler"])
        load_optimizer(self.optimizer, loaded["optimizer"], self.scheduler.num_steps)

    def _sharded(self, *, is_loading: bool) -> dict[str, Any]:
        trained = {
            number: sharded_trained(chunk.module) for number, chunk in enumerate(self.chunks)
        }
        return {
            "model": trained,
            "optimizer": sharded_optimizer(self.optimizer, trained, is_loading=is_loading),
            "scheduler": self.scheduler.state_dict(),
        }


@contextmanager
def _folder_of_all_ranks(target: Path) -> Iterator[Path]:
    """`new_folder`, made and put in place by rank 0, while every rank writes its shards there."""
    with _ranks_meet(target), new_folder(target) if is_writer() else nullcontext() as made:
        if made is not None:
            (made / MCORE_FOLDER).mkdir()
        # the name is random, so the others must be told
        told = [made]
        dist.broadcast_object_list(told)
        (staging,) = told
        assert staging is not None
        yield staging
        dist.barrier()
    # nobody goes on before the folder is in place
    dist.barrier()


@contextmanager
def _ranks_meet(target: Path) -> Iterator[None]:
    """Says what it means when ranks that save together cannot reach one another."""
    try:
        yield
    except (DistError, RuntimeError) as error:
        if isinstance(error, DistError) or _CONNECTION.search(str(error)):
            raise CheckpointError(
                f"another process ended or hung while {target.name} was being saved",
                got=str(error).strip().partition("\n")[0],
                expected="all processes of the run",
                remedy="see what it printed; the checkpoints before are whole, resume from them",
            ) from error
        raise


def is_writer() -> bool:
    """Whether this rank writes the run's small files."""
    return dist.get_rank() == 0
