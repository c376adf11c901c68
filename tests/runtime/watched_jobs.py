"""Real collectives through gloo, in groups that note them; in processes of their own."""

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.node_share_nccl import watched_world
from glm5.runtime.watched import traffic_of


def exchange() -> dict[str, Any]:
    """Of this rank's numbers (10 * rank + ...): what each collective gives, and what was noted."""
    with watched_world(torch.device("cpu")):
        rank = dist.get_rank()
        traffic_of().take()
        own = torch.arange(4.0) + 10 * rank
        gathered, scattered = torch.empty(8), torch.empty(2)
        dist.all_gather_into_tensor(gathered, own)
        dist.reduce_scatter_tensor(scattered, own)
        # rank 0 sends 1 row and 3 rows, rank 1 the other way round
        sent = [1, 3] if rank == 0 else [3, 1]
        received = [1, 3] if rank == 0 else [3, 1]
        rows = torch.empty(4)
        dist.all_to_all_single(rows, own, received, sent)
        total = own.clone()
        dist.all_reduce(total)
        calls = traffic_of().take()
    return {
        "gathered": gathered,
        "scattered": scattered,
        "rows": rows,
        "total": total,
        "noted": [[call.op, call.axis, call.num_bytes] for call in calls],
        "timed": all(call.seconds > 0 for call in calls),
    }
