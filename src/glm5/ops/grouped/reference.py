"""The grouped linear as a loop over groups: what every other implementation must equal."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.ops.block_scaled.product import frozen_linear_reference
from glm5.ops.block_scaled.weight import BlockScaled
from glm5.ops.grouped.inputs import GroupedPair


def grouped_linear_reference(
    x: Tensor,
    weight: Tensor | BlockScaled,
    ends: Tensor,
    pairs: Sequence[GroupedPair | None] = (),
    pair_input: Tensor | None = None,
    *,
    fp8_compute: bool = False,
) -> Tensor:
    """See grouped_linear; waits for the device to learn the sizes of the groups."""
    edges = [0, *ends.tolist()]
    assert edges[-1] == len(x), f"ends say {edges[-1]} rows, x has {len(x)}"
    seen = x if pair_input is None else pair_input
    parts = []
    product = _products(weight, fp8_compute=fp8_compute)
    for group, (first, last) in enumerate(pairwise(edges)):
        y = product(x[first:last], group)
        parts.append(y + _delta(seen[first:last], pairs, group) if any(pairs) else y)
    return torch.cat(parts)


def _products(
    weight: Tensor | BlockScaled, *, fp8_compute: bool
) -> Callable[[Tensor, int], Tensor]:
    """What multiplies the rows of a group by its weight."""
    if isinstance(weight, BlockScaled):
        return lambda x, group: frozen_linear_reference(x, weight[group], fp8_compute=fp8_compute)
    # unbound at once: an index each would make a gradient of the whole stack for every group
    weights = weight.unbind()
    return lambda x, group: F.linear(x, weights[group])


def _delta(x: Tensor, pairs: Sequence[GroupedPair | None], group: int) -> Tensor:
    """The pairs' part of one group's rows; zeros for the outputs that have no pair."""
    rows = next(pair.b.shape[1] for pair in pairs if pair is not None)
    deltas = [
        x.new_zeros(len(x), rows) if pair is None else _pair_delta(x, pair, group) for pair in pairs
    ]
    return torch.cat(deltas, dim=-1)


def _pair_delta(x: Tensor, pair: GroupedPair, group: int) -> Tensor:
    a, b = (factor[min(group, len(factor) - 1)] for factor in (pair.a, pair.b))
    return F.linear(F.linear(x, a), b) * pair.scale
