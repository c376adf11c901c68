"""Times on the GPU's own clock, interleaved, as medians."""

from collections.abc import Callable
from statistics import median

import torch

# About 2 ms: the host queues the timed work meanwhile, so its launch cost is not measured.
_SPIN_CYCLES = 4_000_000


def interleaved_medians(
    functions: dict[str, Callable[[], object]], rounds: int = 10, warmups: int = 2
) -> dict[str, float]:
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
