"""Times on the GPU's own clock, interleaved, as medians; and memory."""

from collections.abc import Callable, Mapping
from statistics import median

import torch

# About 2 ms: the host queues the timed work meanwhile, so its launch cost is not measured.
_SPIN_CYCLES = 4_000_000

Timed = Mapping[str, Callable[[], object]]


def interleaved_medians(functions: Timed, rounds: int = 10, warmups: int = 2) -> dict[str, float]:
    """Median milliseconds of each function, run in turn so that all see the same card."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(warmups + rounds):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SPIN_CYCLES)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if round_number >= warmups:
                samples[name].append(start.elapsed_time(end))
    return {name: median(values) for name, values in samples.items()}


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of torch's allocator beyond what was allocated before; the results count too."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def poison_free_memory(num_bytes: int) -> None:
    """Leave NaN in the memory that the next outputs will be given."""
    torch.cuda.synchronize()
    torch.full((num_bytes // 4,), torch.nan, device="cuda")
