"""Reads tensors of a Megatron-Core checkpoint (torch_dist) without a model, trusting no pickle."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dist_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from glm5.checkpoint.core_layout import stacked_name
from glm5.checkpoint.megatron_io import (
    INDEX_FILE,
    check_listed_files,
    read_index,
    reason_of,
    weights_only,
)
from glm5.errors import CheckpointError

# A trainer names its latest checkpoint there; the folder "release" it loads as weights without a
# history.
RELEASE, TRACKER = "release", "latest_checkpointed_iteration.txt"
# What Megatron's trainer saves beside the model.
_NOT_THE_MODEL = ("optimizer.", "opt_param_scheduler", "rng_state", "rerun_state")


class CoreReader:
    """Tensors by the names of the rules, experts one by one out of their stack.

    `folder` holds the index, or is a trainer's folder, whose latest checkpoint is taken.
    Raises CheckpointError where there is none, its index is more than an index, or a file is not
    what the hashes beside it, if there are any, say.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _checkpoint_in(folder)
        self._metadata = read_index(self.folder)
        check_listed_files(self.folder)
        self._tensors = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_THE_MODEL)
        }
        # the linears of an expert are asked for in turn
        self._stack = lru_cache(maxsize=2)(self._read_whole)

    def names(self) -> list[str]:
        """Every tensor of the model; of a stack of experts one name for each."""
        return [one for name in self._tensors for one in self._unstacked(name)]

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU."""
        stack, expert = stacked_name(name)
        return self._read_whole(name) if expert is None else self._stack(stack)[expert]

    def _unstacked(self, name: str) -> list[str]:
        sign = ".mlp.experts.experts.linear_fc"
        if sign not in name:
            return [name]
        experts = range(self._tensors[name].size[0])
        before, after = name.split(sign)
        return [f"{before}.mlp.experts.local_experts.{e}.linear_fc{after}" for e in experts]

    def _read_whole(self, name: str) -> Tensor:
        entry = self._tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with weights_only():
                dist_checkpoint.load(
                    {name: tensor},
                    storage_reader=_Files(self.folder, self._metadata),
                    no_dist=True,
                )
        except (dist_checkpoint.CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{name} in {self.folder} cannot be read",
                got=reason_of(error),
                remedy="the checkpoint is damaged: use another one",
            ) from error
        return tensor


class _Files(dist_checkpoint.FileSystemReader):
    """Takes the index that was read with care, where torch would unpickle it once more."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._index = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._index


def _checkpoint_in(folder: Path) -> Path:
    """The folder with the index: this one, or the one that a trainer names as its latest."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    latest = tracker.read_bytes().strip()
    found = folder / RELEASE
    if latest.isdigit():
        found = folder / f"iter_{int(latest):07d}"
    elif latest != RELEASE.encode():
        raise CheckpointError(
            f"{tracker} names no checkpoint",
            got=latest[:100],
            expected=f"the number of an iteration, or {RELEASE}",
            remedy="name the folder of one checkpoint, of the format torch_dist",
        )
    if not (found / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{tracker} names a checkpoint that is not there",
            got=latest.decode(),
            expected=str(found / INDEX_FILE),
            remedy="name the folder of one checkpoint, of the format torch_dist",
        )
    return found
