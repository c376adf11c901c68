"""What collectives of a rank without peers leave, over memory full of NaN; in their own process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from glm5.errors import LayoutError
from glm5.runtime.distributed import Layout
from glm5.runtime.simulated import simulated_rank
from glm5.runtime.watched import Traffic

CPU = torch.device("cpu")


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def outputs() -> dict[str, Any]:
    """Rank 2 of 4 context-parallel ranks: each collective's output, and what was noted."""
    with simulated_rank(2, 4, Layout(cp=4), CPU) as traffic:
        group = parallel_state.get_context_parallel_group()
        traffic.take()
        found = {name: job(group) for name, job in JOBS.items()}
        return found | {"noted": _noted(traffic)}


def _noted(traffic: Traffic) -> list[list[Any]]:
    calls = traffic.take()
    assert all(call.seconds >= 0 for call in calls)
    assert not traffic.take()
    return [[call.op, call.axis, call.num_bytes] for call in calls]


def _all_gather(group: Any) -> Tensor:
    out = poisoned(8, 3)
    dist.all_gather_into_tensor(out, torch.arange(6.0).view(2, 3), group=group)
    return out


def _all_gather_in_place(group: Any) -> Tensor:
    whole = poisoned(8)
    whole[4:6] = torch.tensor([1.0, 2.0])
    dist.all_gather_into_tensor(whole, whole[4:6], group=group)
    return whole


def _all_gather_list(group: Any) -> Tensor:
    outs = [poisoned(2) for _ in range(4)]
    dist.all_gather(outs, torch.tensor([1.0, 2.0]), group=group)
    return torch.stack(outs)


def _reduce_scatter(group: Any) -> Tensor:
    out = poisoned(2)
    dist.reduce_scatter_tensor(out, torch.arange(8.0), group=group)
    return out


def _all_reduce(group: Any) -> Tensor:
    x = torch.tensor([3.0])
    dist.all_reduce(x, group=group)
    return x


def _all_to_all(group: Any, sent: list[int], received: list[int]) -> Tensor:
    out = poisoned(sum(received), 2)
    rows = torch.arange(2.0 * sum(sent)).view(-1, 2)
    work = dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)
    work.wait()
    return out


def _broadcast(group: Any) -> Tensor:
    x = torch.tensor([5.0])
    dist.broadcast(x, src=2, group=group)
    return x


def _objects(group: Any) -> list[Any]:
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, {"rank": 2}, group=group)
    return told


JOBS: dict[str, Callable[[Any], Any]] = {
    "all_gather": _all_gather,
    "all_gather_in_place": _all_gather_in_place,
    "all_gather_list": _all_gather_list,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": lambda group: _all_to_all(group, [1, 0, 1, 1], [2, 2, 2, 1]),
    "all_to_all_of_nothing": lambda group: _all_to_all(group, [0] * 4, [1, 0, 0, 0]),
    "broadcast": _broadcast,
}


def refusals() -> list[str]:
    """What needs a peer says so; gathered objects are this rank's, and a barrier is passed."""
    with simulated_rank(2, 4, Layout(cp=4), CPU):
        dist.barrier()
        group = parallel_state.get_context_parallel_group()
        assert _objects(group) == [{"rank": 2}] * 4
        x = torch.zeros(1)
        return [
            _error(lambda: dist.send(x, dst=3, group=group)),
            _error(lambda: dist.recv(x, src=3, group=group)),
            _error(lambda: dist.broadcast(x, src=0, group=group)),
        ]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return "no error"
