"""Every distinct shard of a layout, by one process or several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from glm5.plan.shards import Shard, ShardBuilder, ShardJob
from glm5.plan.worker import build_chunk, start_worker

# A further process pays for importing torch only where there is this much to build.
SHARDS_PER_PROCESS = 32
# Each takes about 0.8 GiB, nearly all of it torch.
MAX_PROCESSES = 6


def all_shards(job: ShardJob) -> Iterator[Shard]:
    """Every distinct shard, in the order of ranks; over several processes where that pays.

    Raises:
        LayoutError, CheckpointError: as building and loading that rank would in training.
    """
    ranks, builder = range(job.world_size), ShardBuilder(job)
    # the first one alone: what is wrong with the layout as a whole is said at once
    yield from builder.build(ranks[:1])
    workers = min(os.cpu_count() or 1, MAX_PROCESSES, len(ranks) // SHARDS_PER_PROCESS)
    if workers < 2:
        yield from builder.build(ranks[1:])
        return
    chunks = [ranks[start : start + 4] for start in range(1, len(ranks), 4)]
    # forking would copy a process that has started threads
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, start_worker, (pickle.dumps(job),)) as pool:
        for shards in pool.map(build_chunk, chunks):
            yield from shards
