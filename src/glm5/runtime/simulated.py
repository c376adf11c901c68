"""One rank of a world that does not exist: what it would build, without its peers or their GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from glm5.errors import LayoutError
from glm5.runtime.cpu import enable_cpu_runtime
from glm5.runtime.distributed import Layout, ensure_distributed, shut_down


@contextmanager
def simulated_rank(rank: int, world_size: int, layout: Layout) -> Iterator[None]:
    """Megatron's parallel state of `rank`; collectives move nothing and return at once.

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
    dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=world_size)
    try:
        ensure_distributed(torch.device("meta"), layout)
        yield
    finally:
        shut_down()
