"""The most bytes of tensors that are alive at once, for devices without such a counter."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryTracker(TorchDispatchMode):
    """Counts the storages that operations make, as torch.cuda.max_memory_allocated would.

    What an operation allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage, once, until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or tensor.is_meta:
            return
        num_bytes = storage.nbytes()
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self.live -= num_bytes
        del self._known[key]
