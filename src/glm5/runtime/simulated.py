"""One rank of a world that does not exist: what it builds and computes, without its peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from glm5.errors import LayoutError
from glm5.runtime.cpu import enable_cpu_runtime
from glm5.runtime.distributed import Layout, ensure_distributed, shut_down
from glm5.runtime.stand_in import STAND_IN, register_stand_in
from glm5.runtime.watched import Traffic, traffic_of


@contextmanager
def simulated_rank(
    rank: int, world_size: int, layout: Layout, device: torch.device | None = None
) -> Iterator[Traffic]:
    """Megatron's parallel state of `rank`; its collectives are local copies (see LocalCopies).

    `device`, by default meta, is where the rank will compute. Yields what its collectives would
    have moved.

    Raises:
        LayoutError: the layout does not divide the world, or this process already has a group.
    """
    if dist.is_initialized():
        raise LayoutError(
            "a rank cannot be simulated in a process that belongs to a real group",
            got=f"{dist.get_world_size()} process(es)",
            expected="no process group",
            remedy="run this in a process of its own",
        )
    if not torch.cuda.is_available():
        enable_cpu_runtime()
    register_stand_in()
    dist.init_process_group(STAND_IN, store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        ensure_distributed(device or torch.device("meta"), layout)
        yield traffic_of()
    finally:
        shut_down()
