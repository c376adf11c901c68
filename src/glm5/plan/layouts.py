"""Which layouts a number of GPUs allows, and what a layout written as text means."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from glm5.config import Glm5Config
from glm5.errors import LayoutError
from glm5.model.layout import check_layout
from glm5.model.schedule import nearest_split, pipeline_layout
from glm5.plan.hardware import GPUS_PER_NODE
from glm5.runtime.distributed import Layout, check_world_size

_INTERLEAVED = (1, 2)
_AXES = tuple(field.name for field in fields(Layout))


@dataclass(frozen=True)
class Placement:
    """A layout on a number of GPUs, with the decoder layers of each of its pp * vpp stages."""

    layout: Layout
    gpus: int
    layers_per_stage: tuple[int, ...]

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.layout.tp * self.layout.pp * self.layout.cp)

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights outside the routed experts."""
        return self.dp * self.layout.cp

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same routed experts."""
        return self.gpus // (self.layout.pp * self.layout.ep * self.layout.etp)

    @property
    def micro_batches(self) -> int:
        """Of each rank in a step whose global batch is one row per GPU."""
        return self.gpus // self.dp

    def in_flight(self, rank: int) -> int:
        """Chunks of a pipeline rank between forward and backward pass, at most.

        1F1B: rank i starts a backward pass after pp - i forward passes; interleaved, after
        2 (pp - i - 1) + (vpp - 1) pp + 1 (Megatron-Core's schedules).
        """
        pp, vpp = self.layout.pp, self.layout.vpp
        warm = pp - rank if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp + 1
        return min(warm, self.micro_batches * vpp)


def parse_layout(text: str) -> Layout:
    """`tp=8,pp=4,ep=32`: sizes of axes, 1 where none is given.

    Raises:
        LayoutError: another axis, one twice, or no positive number.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", item)
        if match is None or match[1] not in _AXES or match[1] in sizes:
            raise LayoutError(
                "this is not a layout",
                got=item.strip() or text,
                expected=f"sizes of {', '.join(_AXES)}, each at most once, such as tp=8,pp=4,ep=32",
                remedy="data parallelism is not given: it takes the GPUs that remain",
            )
        sizes[match[1]] = int(match[2])
    return Layout(**sizes)


def smallest_world(layout: Layout) -> int:
    """The fewest GPUs that the layout divides."""
    return math.lcm(layout.tp * layout.cp, layout.ep * layout.etp) * layout.pp


def place(
    glm5: Glm5Config,
    layout: Layout,
    gpus: int,
    layers_per_stage: tuple[int, ...] | None = None,
) -> Placement:
    """The layout on so many GPUs, checked as training would.

    Raises:
        LayoutError: the model or the number of GPUs cannot be split so.
    """
    check_world_size(layout, gpus)
    check_layout(glm5, layout)
    stages = layout.pp * layout.vpp
    split = tuple(layers_per_stage or nearest_split(glm5, stages))
    pipeline_layout(glm5, stages, split, mtp=False)
    return Placement(layout, gpus, split)


def valid_placements(glm5: Glm5Config, gpus: int) -> Iterator[Placement]:
    """Every layout of so many GPUs that this model can be trained in.

    Tensor parallelism stays within a node, where its collectives are fast enough to be of use.
    Whole experts are handed out before any is cut.
    """
    axes = (
        _divisors(min(gpus, GPUS_PER_NODE)),
        _divisors(gpus),
        _INTERLEAVED,
        _divisors(gpus),
        _divisors(glm5.n_routed_experts),
    )
    for tp, pp, vpp, cp, ep in itertools.product(*axes):
        if gpus % (tp * pp * cp) or gpus % (ep * pp):
            continue
        try:
            yield place(glm5, Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep), gpus)
        except LayoutError:
            continue


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
