"""The full-scale dry run: every rank's shard of a model, without its weights or its machines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm5.checkpoint.fp8 import SCALE_SUFFIX
from glm5.checkpoint.glm5_rules import glm5_rules, mtp_hf_names
from glm5.checkpoint.hf_layout import HfTensor
from glm5.checkpoint.rules import Rule, check_total
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError
from glm5.plan.all_shards import all_shards
from glm5.plan.coverage import Coverage, Reverse
from glm5.plan.published import disk_tensors
from glm5.plan.shards import ShardJob
from glm5.runtime.distributed import Layout

_SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class DryRun:
    """What was found to hold."""

    num_shards: int
    num_tensors: int
    """Tensors on disk that some rank reads, scales included."""
    num_left_out: int
    """Tensors of the MTP layer, where it is not built."""
    num_elements: int
    """Elements of the weights that are read, each counted once."""
    seconds: float


def dry_run(
    config: Glm5Config,
    layout: Layout,
    *,
    include_mtp: bool = False,
    layers_per_stage: Sequence[int] | None = None,
    rules: Sequence[Rule] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DryRun:
    """Builds every distinct shard and checks that together they are the published checkpoint.

    Every tensor on disk must be read exactly once per replica, in the right parts, and the rules
    must make every one again. `rules` are the family's unless given; `progress` hears (shards
    done, of how many).

    Raises:
        LayoutError: as in training. CheckpointError: a rule does not fit its tensors.
        CheckFailedError: a tensor is missing, read twice or cut wrongly.
    """
    started = time.perf_counter()
    if rules is None:
        rules = glm5_rules(config, include_mtp=include_mtp)
    split = None if layers_per_stage is None else tuple(layers_per_stage)
    job = ShardJob(config, layout, rules, include_mtp, split)
    left_out = set() if include_mtp else set(mtp_hf_names(config))
    plain = config.model_copy(update={"fp8": None})
    expected = _without(disk_tensors(config), left_out)
    coverage = Coverage(config, expected, {job.coordinates(r) for r in range(job.world_size)})
    reverse = Reverse(disk_tensors(plain))
    for done, shard in enumerate(all_shards(job), 1):
        coverage.add(shard)
        reverse.add(shard)
        progress(done, job.world_size)
    weights = _without(disk_tensors(plain), left_out)
    check_total(rules, list(weights), reverse.names())
    _raise_if_any([*coverage.problems(), *reverse.problems(rules)])
    return DryRun(
        num_shards=job.world_size,
        num_tensors=len(expected),
        num_left_out=len(disk_tensors(config)) - len(expected),
        num_elements=sum(math.prod(tensor.shape) for tensor in weights.values()),
        seconds=time.perf_counter() - started,
    )


def _without(tensors: dict[str, HfTensor], names: set[str]) -> dict[str, HfTensor]:
    """A scale goes with its weight."""
    return {n: tensor for n, tensor in tensors.items() if n.removesuffix(SCALE_SUFFIX) not in names}


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise CheckFailedError(
            "the shards do not hold the checkpoint exactly once",
            got="\n            ".join([f"{len(problems)} problems:", *problems[:_SHOWN_PROBLEMS]]),
            expected="every tensor once per replica, in the right parts, and made again",
            remedy="this is a mistake in the rules or the layers: please report it",
        )
