"""A process that builds shards for another one; nothing heavy is imported before it is quiet."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5.plan.shards import Shard, ShardBuilder

_builder: ShardBuilder | None = None


def start_worker(job: bytes) -> None:
    """Takes the job, a pickled ShardJob: to read it is to import the libraries.

    The first shard was built by the caller, which has heard what they have to say.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from glm5.plan.shards import ShardBuilder

    global _builder  # noqa: PLW0603 - a worker process has one job, sent once
    _builder = ShardBuilder(pickle.loads(job))


def build_chunk(ranks: Sequence[int]) -> list[Shard]:
    """The shards of these ranks."""
    assert _builder is not None
    return list(_builder.build(ranks))
