"""What the first rank finds out, told to the others through the memory of the hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from glm5.errors import Glm5Error


class FirstRank:
    """Runs what only one process may do; an error there is every rank's. All calls are collective.

    Over gloo, so that nothing of it lies in a GPU's memory; values are pickled.
    """

    def __init__(self, timeout_minutes: float) -> None:
        """timeout_minutes: how long the others wait for it."""
        timeout = timedelta(minutes=timeout_minutes)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._is_alone = dist.get_world_size() == 1

    def tell[T](self, work: Callable[[], T]) -> T:
        """What work() returns on the first rank, on every rank.

        Raises:
            Glm5Error: that one raised it.
        """
        if self._is_alone:
            return work()
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                outcome = [work()]
            except Glm5Error as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], Glm5Error):
            raise outcome[0]
        told: T = outcome[0]
        return told

    def keep[T](self, work: Callable[[], T]) -> T | None:
        """What work() returns on the first rank, there alone.

        Raises:
            Glm5Error: that one raised it.
        """
        kept: list[T] = []
        self.tell(lambda: kept.append(work()))
        return kept[0] if kept else None

    def deal[T](self, share_of: Callable[[int], T]) -> T:
        """share_of(rank) of the first rank, for each rank its own."""
        rank, others = dist.get_rank(), range(1, dist.get_world_size())
        if rank == 0:
            # one at a time, so that no more than two shares are in memory twice
            for other in others:
                dist.send_object_list([share_of(other)], dst=other, group=self._group)
            return share_of(0)
        received: list[Any] = [None]
        dist.recv_object_list(received, src=0, group=self._group)
        share: T = received[0]
        return share

    def gather[T](self, own: T) -> Sequence[T]:
        """Every rank's `own`, by rank, on the first one; nothing on the others."""
        if dist.get_rank():
            dist.send_object_list([own], dst=0, group=self._group)
            return []
        gathered = [own]
        for other in range(1, dist.get_world_size()):
            received: list[Any] = [None]
            dist.recv_object_list(received, src=other, group=self._group)
            gathered += received
        return gathered
