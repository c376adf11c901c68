"""What of an optimiser is saved, in a form that every layout reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer


def sharded_optimizer(
    optimizer: ChainedOptimizer, trained: dict[int, Any], *, is_loading: bool
) -> dict[int, Any]:
    """Megatron's sharded tensors of the optimiser of `trained`, in any layout alike; collective.

    Every parameter has its fp32 value and its two moments, in the parameter's own shape: ranks that
    share an optimiser gather them on the host. Megatron's own state dict adds parameter groups and
    numbers that name the layout; the run's settings and its schedule say all that those hold.
    Before the first update the moments are zero.
    """
    if not is_loading:
        _make_moments(optimizer)
    states = (
        part.sharded_param_state_fully_reshardable(trained, is_loading, {})
        for part in _parts(optimizer)
    )
    # what is empty would look to Megatron like a plain value that one rank has and others lack
    return {number: state for number, state in enumerate(states) if state}


def load_optimizer(optimizer: ChainedOptimizer, state: dict[int, Any], steps: int) -> None:
    """Puts loaded tensors of `sharded_optimizer` into the optimiser, all of them at `steps`."""
    _make_moments(optimizer)
    for number, part in enumerate(_parts(optimizer)):
        with _steps_set_to(steps, part.optimizer):
            part.load_parameter_state_from_fully_reshardable(state.get(number, {}))


def _parts(optimizer: ChainedOptimizer) -> Iterator[DistributedOptimizer]:
    """One optimiser, and one more where routed experts train; a stage may lack either."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield part


def _make_moments(optimizer: ChainedOptimizer) -> None:
    """Adam makes its moments in its first step: one that changes nothing and does not count."""
    for part in _parts(optimizer):
        if part.optimizer.state:
            continue
        groups = part.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        part._init_optimizer_states_with_dummy_values()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        with _steps_set_to(0, part.optimizer):
            pass


@contextmanager
def _steps_set_to(steps: int, adam: Any) -> Iterator[None]:
    """Sets what Adam counts; meanwhile torch's counters are away, which Megatron does not load."""
    counters = [(kept, kept.pop("step")) for kept in adam.state.values() if "step" in kept]
    yield
    for kept, counter in counters:
        kept["step"] = counter.fill_(steps)
    for group in adam.param_groups:
        # a fused Adam counts for a group, torch's for each parameter
        if "step" in group:
            group["step"] = steps
