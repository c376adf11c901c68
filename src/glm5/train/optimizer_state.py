"""What of an optimiser is saved, in a form that every layout reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import MegatronOptimizer


def sharded_optimizer(
    optimizer: MegatronOptimizer, trained: dict[str, Any], *, is_loading: bool
) -> tuple[dict[str, Any], int]:
    """(Megatron's sharded tensors of the optimiser of `trained`, steps taken), in any layout alike.

    Megatron chains one optimiser more where experts are split, with numbered keys and parameter
    groups of its own. So keys go without that number, and groups are not saved: the run's settings
    and its schedule say all that they hold but the step.
    """
    # the distributed-optimiser formats name the layout, this one does not
    state = optimizer.sharded_state_dict(
        trained, is_loading=is_loading, metadata={"chained_optim_avoid_prefix": True}
    )
    steps = {step for adam in _adam_states(state) if (step := _take_step(adam)) is not None}
    assert len(steps) <= 1, f"parameters took different numbers of steps: {steps}"
    return state, steps.pop() if steps else 0


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], step: int) -> None:
    """Puts loaded tensors of `sharded_optimizer` into the optimiser, all of them at `step`."""
    for adam in _adam_states(state):
        # empty where a stage has no experts, and then not loaded at all
        adam.setdefault("state", {})["common_step"] = step
        for group in adam["param_groups"]:
            if "step" in group:
                group["step"] = step
    optimizer.load_state_dict(state)


def _adam_states(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The `state` and `param_groups` of each optimiser of a chain, under mixed precision or not."""
    if "param_groups" in state:
        yield state
        return
    for part in state.values():
        if isinstance(part, dict):
            yield from _adam_states(part)


def _take_step(adam: dict[str, Any]) -> int | None:
    """Steps taken, from where torch's Adam or a fused one counts them; its groups stay local."""
    groups = adam["param_groups"]
    counts = [adam["state"].pop("common_step", None), *(group.get("step") for group in groups)]
    for group in groups:
        group["params"] = group["params"].unwrap()
    adam["param_groups"] = LocalNonpersistentObject(groups)
    return next((int(count) for count in counts if count is not None), None)
