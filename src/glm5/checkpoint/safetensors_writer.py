"""Streaming writer of sharded safetensors folders."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.safetensors_file import (
    SafetensorsFiles,
    TensorPlan,
    TensorSpec,
    plan_bytes,
    tensor_bytes,
)
from glm5.checkpoint.safetensors_index import INDEX_FILE
from glm5.errors import CheckpointError

SHARD_BYTES = 5 * 10**9


class SafetensorsWriter:
    """Write a Hugging Face folder tensor by tensor; the folder appears whole, at `close`, or not.

    The tensors of `plan` fill shards of at most `max_shard_bytes` (or one larger tensor) in the
    plan's order. All shards are laid out at once, so `add` writes each tensor straight to its
    place, in any order, and holds none. As a context manager it closes on success and removes what
    it wrote on an exception. Raises CheckpointError for a folder that is not empty and a dtype that
    safetensors lacks. A process that is killed leaves the hidden `.<name>.partial-*` folder behind,
    which may be removed.
    """

    def __init__(
        self, folder: str | Path, plan: TensorPlan, max_shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder = Path(folder)
        shards = _named(_shards(plan, max_shard_bytes))
        with ExitStack() as stack:
            self._staging = stack.enter_context(new_folder(folder))
            self._files = SafetensorsFiles({self._staging / n: part for n, part in shards.items()})
            self.add_text(INDEX_FILE, _index(shards))
            # all went well, so the staging folder stays until close
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._stack.__exit__(kind, error, trace)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor, of any device and layout; the caller may reuse it at once.

        At most one contiguous copy of it is made on the CPU. Raises CheckpointError for a tensor
        that is not planned, is added twice, or has another shape or dtype than planned.
        """
        self._files.write(name, tensor)

    def add_text(self, name: str, text: str) -> None:
        """Write a small file such as config.json beside the shards, as UTF-8."""
        self._free_path(name).write_text(text, encoding="utf-8")

    def copy_file(self, source: str | Path) -> None:
        """Copy a file such as tokenizer.json beside the shards, under its own name."""
        source = Path(source)
        shutil.copyfile(source, self._free_path(source.name))

    def close(self) -> None:
        """Put the folder in its place in one step.

        Raises CheckpointError, and removes what was written, if planned tensors are missing or the
        folder holds something by now.
        """
        with self._stack:
            self._files.check_complete()

    def _free_path(self, name: str) -> Path:
        relative = Path(name)
        path = self._staging / relative
        if relative.is_absolute() or ".." in relative.parts or path.exists():
            raise CheckpointError(
                f"cannot write a file {name!r} to {self.folder}",
                expected="a relative path inside the folder that was not used before",
                remedy="write each file once",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _shards(plan: TensorPlan, max_bytes: int) -> list[TensorPlan]:
    """The plan cut, in its order, into parts of at most `max_bytes` or one larger tensor."""
    shards: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in plan.items():
        size = tensor_bytes(spec)
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = spec
        used += size
    return list(shards)


def _named(shards: list[TensorPlan]) -> dict[str, TensorPlan]:
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def _index(shards: dict[str, TensorPlan]) -> str:
    weight_map = {name: file for file, plan in shards.items() for name in plan}
    total_size = sum(map(plan_bytes, shards.values()))
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
