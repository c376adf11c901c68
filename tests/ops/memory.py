"""Peak of the bytes that torch's CPU allocator hands out while a function runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Memory(NamedTuple):
    """Highest sum of live bytes, above what was live before, and the largest single tensor."""

    peak_bytes: int
    largest_bytes: int


def measure_memory(function: Callable[[], Any]) -> tuple[Any, Memory]:
    """Run the function; every allocation counts, also those inside a torch operator."""
    options = {"profile_memory": True, "acc_events": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        result = function()
    events = profiler.profiler.kineto_results.events()
    sizes = [
        event.nbytes()
        for event in sorted(events, key=lambda event: event.start_ns())
        if event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU
    ]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return result, Memory(peak, max(sizes, default=0))
