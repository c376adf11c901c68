"""Process groups that note what every collective moves, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

# What Megatron-Core calls its groups; others keep their own description.
AXES = {
    "default_pg": "world",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "tp+pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp+cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp+dp+cp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "all",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep+etp",
    "EXPERT_DATA_PARALLEL_GROUP": "expert dp",
}


class Call(NamedTuple):
    """One collective of one rank."""

    op: str
    axis: str
    num_bytes: int
    """That pass this rank's link in the busier of its two directions."""
    seconds: float


class Traffic:
    """The collectives of a process, over all of its groups, in order; nothing waits for a GPU."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str, int, Callable[[], float]]] = []

    def add(self, op: str, axis: str, num_bytes: int, seconds: Callable[[], float]) -> None:
        """One collective that has been issued; `seconds` is asked once its device is done."""
        self._open.append((op, axis, num_bytes, seconds))

    def take(self) -> list[Call]:
        """Those since the last time; on a GPU the caller has waited for its work."""
        taken, self._open = self._open, []
        return [Call(op, axis, count, seconds()) for op, axis, count, seconds in taken]


class WatchedGroup(dist.ProcessGroup):
    """A process group whose collectives run in `inner`, which has c10d's methods.

    `inner` may finish them later: every one is waited for, on a GPU by its stream alone. A group of
    one rank moves nothing and is not noted.
    """

    def __init__(self, inner: Any, rank: int, size: int, traffic: Traffic) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner = inner
        self.traffic = traffic
        self.axis = ""
        self._name = ""

    # c10d keeps these two for groups with backends of its own; of its methods for single tensors,
    # which are missing below, torch.distributed calls none
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self.axis = AXES.get(description, description.lower())

    @property
    def group_desc(self) -> str:
        return self.axis

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        # a ring passes every byte twice: to add it up, and to hand the sum round
        moved = 2 * self._others_part(_bytes(tensors))
        return self._watch("all-reduce", tensors[0], moved, self.inner.allreduce, tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        del opts
        return [self.allreduce([tensor], c10d.AllreduceOptions()) for tensor in tensors][-1]

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        moved = self._others_part(output.nbytes)
        options = opts or c10d.AllgatherOptions()
        call = self.inner._allgather_base
        return self._watch("all-gather", tensor, moved, call, output, tensor, options)

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        moved = self._others_part(_bytes(outputs[0]))
        call = self.inner.allgather
        return self._watch("all-gather", tensors[0], moved, call, outputs, tensors, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        del opts
        pairs = zip(outputs, tensors, strict=True)
        return [self._allgather_base(output, tensor) for output, tensor in pairs][-1]

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        moved = self._others_part(tensor.nbytes)
        options = opts or c10d.ReduceScatterOptions()
        call = self.inner._reduce_scatter_base
        return self._watch("reduce-scatter", tensor, moved, call, output, tensor, options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        options = c10d.ReduceScatterOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        pairs = zip(outputs, tensors, strict=True)
        return [self._reduce_scatter_base(output, tensor, options) for output, tensor in pairs][-1]

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> dist.Work:
        # on a CPU Megatron-Core leaves them tensors
        sent, received = _numbers(input_splits), _numbers(output_splits)
        moved = max(self._to_others(tensor, sent), self._to_others(output, received))
        options = opts or c10d.AllToAllOptions()
        call = self.inner.alltoall_base
        return self._watch(
            "all-to-all", tensor, moved, call, output, tensor, received, sent, options
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        moved = _bytes(tensors)
        return self._watch("broadcast", tensors[0], moved, self.inner.broadcast, tensors, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        # of a group without C++ backends c10d takes the device to be the CPU
        del opts
        _wait(self.inner.barrier(c10d.BarrierOptions()))
        return _finished()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        return self.inner.recv(tensors, peer, tag)

    def _others_part(self, num_bytes: int) -> int:
        """Of what all ranks have together, all but this rank's equal part."""
        return num_bytes * (self.size() - 1) // self.size()

    def _to_others(self, tensor: Tensor, splits: list[int]) -> int:
        """Bytes of the rows that do not stay here."""
        if not splits or not len(tensor):
            return self._others_part(tensor.nbytes)
        return tensor.nbytes // len(tensor) * (len(tensor) - splits[self.rank()])

    def _watch(
        self, op: str, tensor: Tensor, num_bytes: int, call: Callable[..., Any], *args: Any
    ) -> dist.Work:
        if self.size() == 1:
            _wait(call(*args))
            return _finished()
        stop = _start_clock(tensor.device)
        _wait(call(*args))
        self.traffic.add(op, self.axis, num_bytes, stop())
        return _finished()


def register_watched(name: str, make_inner: Callable[[Any], Any]) -> None:
    """Makes `name` a backend of torch.distributed; once per process, later calls do nothing.

    make_inner: from c10d's options of a backend (group_rank, group_size, store, ...) to what runs
    the collectives of that group. All groups share the `traffic` of the first one, the world's.
    """
    if hasattr(dist.Backend, name.upper()):
        return

    def create(options: Any, backend_options: Any) -> WatchedGroup:
        del backend_options
        world = dist.group.WORLD
        traffic = Traffic() if world is None else traffic_of(world)
        inner = make_inner(options)
        return WatchedGroup(inner, options.group_rank, options.group_size, traffic)

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def traffic_of(group: dist.ProcessGroup | None = None) -> Traffic:
    """What a watched group notes; of the world without `group`."""
    group = group or dist.group.WORLD
    assert isinstance(group, WatchedGroup), f"{group} is not watched"
    return group.traffic


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _numbers(splits: Sequence[int] | None) -> list[int]:
    return [] if splits is None else [int(number) for number in splits]


def _start_clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts; the result stops, and what that gives tells the seconds in between."""
    if device.type != "cuda":
        started = time.perf_counter()

        def stop_host() -> Callable[[], float]:
            seconds = time.perf_counter() - started
            return lambda: seconds

        return stop_host
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def stop_device() -> Callable[[], float]:
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3

    return stop_device


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _finished() -> dist.Work:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future)
