"""Sharded state through megatron.core.dist_checkpointing, without trusting its pickles."""

from __future__ import annotations

import pickle
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from glm5.checkpoint.integrity import MANIFEST, changed_files, damaged_files, write_manifest
from glm5.errors import CheckpointError

# torch.distributed.checkpoint pickles its index; these are the names that an index needs.
_INDEX_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "torch._utils": {"_get_layout"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
INDEX_FILE = ".metadata"
# A full disk, a damaged or a foreign file surfaces as any of these from inside Megatron and torch.
_FILE_ERRORS = (
    dist_checkpointing.core.CheckpointingException,
    dist_checkpoint.CheckpointException,
    OSError,
    # up to Megatron-Core 0.18 plain values have a file of their own, common.pt
    pickle.UnpicklingError,
)


def save_sharded(folder: Path, state: dict[str, Any]) -> None:
    """Writes `state` (sharded tensors and plain values) into the empty `folder`; collective.

    On a CPU no tensor is copied, on a GPU all of them are brought to the host at once. The first
    rank then reads every file once more, for the SHA-256 that loading compares.

    Raises:
        CheckpointError: the files cannot be written, on this rank or another.
    """
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data.is_cpu:
            value.data = _with_own_storage(value.data)
    try:
        with _results_in_process():
            dist_checkpointing.save(state, str(folder))
        _write_manifest(folder)
    except _FILE_ERRORS as error:
        # Megatron's writers do not pass on what the system said
        free = shutil.disk_usage(folder).free / 2**30
        raise CheckpointError(
            f"{folder} cannot be written",
            got=f"{reason_of(error)}; {free:.2f} GiB free there",
            remedy="make room or choose another folder; checkpoints saved before are as they were",
        ) from error


def _write_manifest(folder: Path) -> None:
    """On the first rank; the others learn how it went."""
    told: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_manifest(folder)
        except OSError as error:
            told = [error]
    dist.broadcast_object_list(told)
    if told[0] is not None:
        raise told[0]


def _with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own: Megatron clones what is part of a larger one.

    Gate and up are halves of one weight, so that most of a model would be in memory twice.
    """
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # bytes, because numpy has no bfloat16
    raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


def load_sharded(
    folder: Path, state: dict[str, Any], *, allow_unread: bool = False
) -> dict[str, Any]:
    """The checkpoint's values for the sharded tensors of `state`, and its plain values; collective.

    With `allow_unread` the checkpoint may hold more (the optimiser's tensors), else not.

    Raises:
        CheckpointError: not such a checkpoint, a file that is not as it was saved, another set of
        tensors, or an index that names code.
    """
    read_index(folder)
    _check_files(folder)
    try:
        with weights_only():
            loaded, missing, unexpected = dist_checkpointing.load(
                state, str(folder), strict=dist_checkpointing.validation.StrictHandling.RETURN_ALL
            )
    except _FILE_ERRORS as error:
        raise CheckpointError(
            f"{folder} cannot be loaded",
            got=reason_of(error),
            remedy="it is damaged, or of another model; use another checkpoint",
        ) from error
    # what the checkpoint has and `state` does not ask for is "missing" from the request
    if unexpected or (missing and not allow_unread):
        raise CheckpointError(
            f"{folder} holds another set of tensors",
            got=f"missing {sorted(missing)[:10]}, unexpected {sorted(unexpected)[:10]}",
            remedy="load it with the configuration that it was saved with",
        )
    return loaded


@contextmanager
def _results_in_process() -> Iterator[None]:
    """Collects the writer threads' results in this process.

    Megatron starts a manager process for that even when it saves synchronously, and spawning one
    runs a user's script again unless the script has a main guard.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def reason_of(error: BaseException) -> str:
    """One line on why Megatron or torch could not read or write a checkpoint."""
    if isinstance(error, dist_checkpoint.CheckpointException):
        # one failure per rank; its own text is all of their tracebacks
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):
        # torch's own text tells the reader to switch the check off
        return "plain values that are more than numbers, strings and containers"
    return f"{type(error).__name__}: {str(error).strip().partition('\n')[0]}"


@contextmanager
def weights_only() -> Iterator[None]:
    """Plain values come back as numbers, strings and containers, or not at all.

    torch's planner reads them with torch.load(weights_only=False), which runs whatever code a
    checkpoint holds.
    """
    load = torch.load

    def safe_load(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "weights_only": True})

    torch.load = safe_load
    try:
        yield
    finally:
        torch.load = load


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index of torch.distributed.checkpoint and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _INDEX_GLOBALS.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint, which says what it holds and where.

    Raises:
        CheckpointError: there is none, or it is more than an index.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(
            f"{folder} is not a Megatron-Core checkpoint",
            got=f"no {INDEX_FILE}",
            expected="a folder of the format torch_dist, with its index",
            remedy="name the folder of one checkpoint, or convert the Hugging Face one again",
        )
    try:
        with index.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__}")
    except Exception as error:
        raise CheckpointError(
            f"{index} is damaged, or holds more than an index",
            got=error,
            expected="the pickled index of torch.distributed.checkpoint",
            remedy="do not load checkpoints of unknown origin",
        ) from error
    return metadata


def _check_files(folder: Path) -> None:
    """Every file has the bytes that were saved, and there are no others; collective."""
    _raise_if_changed(folder, changed_files)


def check_listed_files(folder: Path) -> None:
    """Where a trainer saved hashes, the files that they are of have the bytes that were saved.

    One process reads all of them. Raises CheckpointError.
    """
    if (folder / MANIFEST).is_file():
        _raise_if_changed(folder, damaged_files)


def _raise_if_changed(folder: Path, changes: Callable[[Path], list[str]]) -> None:
    try:
        changed = changes(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST} cannot be read, so nothing tells whether the checkpoint is whole",
            got=f"{type(error).__name__}: {error}",
            expected="the SHA-256 of every file, which a save writes",
            remedy="use another checkpoint, or make it again",
        ) from error
    if changed:
        raise CheckpointError(
            f"{folder} is damaged: files changed since they were saved",
            got="; ".join(changed),
            remedy="use another checkpoint, or make it again",
        )
