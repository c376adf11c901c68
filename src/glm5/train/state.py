"""Saves and restores a run: weights that train, optimiser and schedule, in one atomic folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

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
from glm5.train.optimizer_state import load_optimizer, sharded_optimizer


class TrainState:
    """What a run must find again to go on bit for bit; the data order is a function of the step."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self.model = model
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
        load_trained(self.model.module, loaded["model"])
        load_optimizer(self.optimizer, loaded["optimizer"], loaded["step"])
        self.scheduler.load_state_dict(loaded["scheduler"])

    def _sharded(self, *, is_loading: bool) -> dict[str, Any]:
        trained = sharded_trained(self.model.module)
        optimizer, step = sharded_optimizer(self.optimizer, trained, is_loading=is_loading)
        return {
            "model": trained,
            "optimizer": optimizer,
            "step": step,
            "scheduler": self.scheduler.state_dict(),
        }


@contextmanager
def _folder_of_all_ranks(target: Path) -> Iterator[Path]:
    """`new_folder`, made and put in place by rank 0, while every rank writes its shards there."""
    with new_folder(target) if is_writer() else nullcontext() as made:
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


def is_writer() -> bool:
    """Whether this rank writes the run's small files."""
    return dist.get_rank() == 0
