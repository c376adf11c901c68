"""Collectives of a rank that has no peers: local copies of the sizes that would have travelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from glm5.errors import LayoutError
from glm5.runtime.watched import register_watched

STAND_IN = "stand_in"


class LocalCopies:
    """c10d's methods for one rank of a group whose other ranks do not exist.

    What the others would have sent is taken to be what this rank has: a gather repeats it, a
    reduction keeps it, an all-to-all repeats this rank's rows until its output is full. So every
    output is written, with values as this rank's, on its device, and no host waits.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> None:
        """Every rank adds nothing."""

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> None:
        del opts
        slots = output.view(self._size, *tensor.shape)
        if not _share_memory(output, tensor):
            slots.copy_(tensor)
            return
        # parameters are gathered in place
        for number, slot in enumerate(slots):
            if number != self._rank:
                slot.copy_(tensor)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> None:
        """Every output of this rank's list is its tensor."""
        del opts
        for output in outputs[0]:
            output.copy_(tensors[0])

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> None:
        del opts
        own = tensor.view(self._size, *output.shape)[self._rank]
        # gradients are scattered in place
        if not _share_memory(output, tensor):
            output.copy_(own)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> None:
        """Rows of the output: those of the input, again and again; zeros where it has none."""
        del output_splits, input_splits, opts
        if not len(tensor):
            output.zero_()
            return
        times, rest = divmod(len(output), len(tensor))
        full = times * len(tensor)
        output[:full].view(times, *tensor.shape).copy_(tensor)
        output[full:].copy_(tensor[:rest])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """What this rank sends, it has.

        Raises:
            LayoutError: another rank would send.
        """
        del tensors
        if opts.rootRank != self._rank:
            raise LayoutError(
                "a rank without peers receives nothing that only another rank has",
                got=f"a broadcast by rank {opts.rootRank} of {self._size}",
                expected=f"one by this rank, {self._rank}",
                remedy="simulate the rank that sends",
            )

    def barrier(self, opts: Any = None) -> None:
        """There is nobody to wait for."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        """Raises LayoutError: there is nobody to send to."""
        raise _no_peer("send to", peer)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        """Raises LayoutError: there is nobody to receive from."""
        raise _no_peer("receive from", peer)


def register_stand_in() -> None:
    """Makes `STAND_IN` a backend of torch.distributed in this process."""
    register_watched(STAND_IN, lambda options: LocalCopies(options.group_rank, options.group_size))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _no_peer(verb: str, peer: int) -> LayoutError:
    return LayoutError(
        f"a rank without peers cannot {verb} another one",
        got=f"rank {peer}",
        remedy="simulate a layout with pp 1: only pipeline stages send to each other",
    )
