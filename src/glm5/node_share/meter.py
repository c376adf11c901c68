"""Bytes of tensors on a device, now and at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from glm5.bench.memory_tracker import MemoryTracker


class Meter(Protocol):
    """Bytes since the metering began."""

    @property
    def live(self) -> int:
        """Of tensors now."""

    @property
    def peak(self) -> int:
        """Of tensors at most."""

    @property
    def reserved(self) -> int:
        """Taken from the device at most, free pieces between tensors included."""

    @property
    def outside(self) -> int:
        """Taken from the device by others: the context, kernels, libraries, other processes."""


class CudaMeter:
    """PyTorch's allocator."""

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    @property
    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    @property
    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


class HostMeter:
    """What a MemoryTracker sees; the host gives out just what is asked for."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    @property
    def live(self) -> int:
        return self._tracker.live

    @property
    def peak(self) -> int:
        return self._tracker.peak

    @property
    def reserved(self) -> int:
        return self._tracker.peak

    @property
    def outside(self) -> int:
        return 0


@contextmanager
def metered(device: torch.device, limit_bytes: float | None = None) -> Iterator[Meter]:
    """Meters what happens inside; on a GPU tensors must find room in `limit_bytes`."""
    if device.type == "cpu":
        with MemoryTracker() as tracker:
            yield HostMeter(tracker)
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats()
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    try:
        yield CudaMeter()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
