"""Sharded state through megatron.core.dist_checkpointing, without trusting its pickles."""

from __future__ import annotations

import json
import pickle
import queue
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import (
    INTEGRITY_FNAME,
    verify_integrity_manifest,
)
from torch import Tensor

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
_INDEX_FILE = ".metadata"
# A full disk, a damaged or a foreign file surfaces as any of these from inside Megatron and torch.
_FILE_ERRORS = (
    dist_checkpointing.core.CheckpointingException,
    dist_checkpoint.CheckpointException,
    OSError,
)
# Older Megatron releases pickled the common state into this file.
_LEGACY_FILE = "common.pt"


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
            dist_checkpointing.save(state, str(folder), verify_integrity=True)
    except _FILE_ERRORS as error:
        # Megatron's writers do not pass on what the system said
        free = shutil.disk_usage(folder).free / 2**30
        raise CheckpointError(
            f"{folder} cannot be written",
            got=f"{_reason(error)}; {free:.2f} GiB free there",
            remedy="make room or choose another folder; checkpoints saved before are as they were",
        ) from error


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
    _check_index(folder)
    _check_files(folder)
    try:
        with _weights_only():
            loaded, missing, unexpected = dist_checkpointing.load(
                state, str(folder), strict=dist_checkpointing.validation.StrictHandling.RETURN_ALL
            )
    except _FILE_ERRORS as error:
        raise CheckpointError(
            f"{folder} cannot be loaded",
            got=_reason(error),
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


def _reason(error: BaseException) -> str:
    if isinstance(error, dist_checkpoint.CheckpointException):
        # one failure per rank; its own text is all of their tracebacks
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):
        # torch's own text tells the reader to switch the check off
        return "plain values that are more than numbers, strings and containers"
    return f"{type(error).__name__}: {str(error).strip().partition('\n')[0]}"


@contextmanager
def _weights_only() -> Iterator[None]:
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


def _check_index(folder: Path) -> None:
    index = folder / _INDEX_FILE
    if not index.is_file() or (folder / _LEGACY_FILE).exists():
        raise CheckpointError(
            f"{folder} is not a Megatron-Core checkpoint of this project",
            got="common.pt, which is a pickle" if index.is_file() else f"no {_INDEX_FILE}",
            expected="a folder that glm5 wrote",
            remedy="convert the Hugging Face checkpoint again",
        )
    try:
        with index.open("rb") as file:
            _IndexUnpickler(file).load()
    except Exception as error:
        raise CheckpointError(
            f"{index} is damaged, or holds more than an index",
            got=error,
            expected="the pickled index of torch.distributed.checkpoint",
            remedy="do not load checkpoints of unknown origin",
        ) from error


def _check_files(folder: Path) -> None:
    """Every file has the bytes that were saved; collective."""
    manifest = folder / INTEGRITY_FNAME
    try:
        # on all ranks: Megatron reads it on the first one, while the others wait for the verdict
        dict(json.loads(manifest.read_text(encoding="utf-8"))["files"])
        verify_integrity_manifest(str(folder))
    except dist_checkpointing.core.CheckpointingException as error:
        _, *changed = str(error).splitlines()
        raise CheckpointError(
            f"{folder} is damaged: files changed since they were saved",
            got="; ".join(line.strip() for line in changed),
            remedy="use another checkpoint, or make it again",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{manifest} cannot be read, so nothing tells whether the checkpoint is whole",
            got=f"{type(error).__name__}: {error}",
            expected="the SHA-256 of every file, which a save writes",
            remedy="use another checkpoint, or make it again",
        ) from error
