"""What grouped_linear accepts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.ops.block_scaled.weight import BlockScaled

# The low-rank side of a tile lies in a multiprocessor's shared memory.
MAX_RANK = 128


@dataclass(frozen=True, slots=True, eq=False)
class GroupedPair:
    """Low-rank pairs of one linear of every group: delta W_g = scale * b_g a_g.

    a [n, rank, in_features] and b [n, out_features, rank], of the dtype of the weight. The a of all
    pairs of a linear may have 1 in place of n: one factor that all groups share. So may their b.
    """

    a: Tensor
    b: Tensor
    scale: float


def check_inputs(
    x: Tensor,
    weight: Tensor | BlockScaled,
    ends: Tensor,
    pairs: Sequence[GroupedPair | None],
    pair_input: Tensor | None,
    *,
    fp8_compute: bool,
) -> None:
    """Assert that the tensors of grouped_linear fit together; the model makes them, not a user."""
    n, out_features, in_features = weight.shape
    assert x.ndim == 2 and x.shape[1] == in_features, f"x {x.shape}, weight {weight.shape}"
    assert ends.shape == (n,) and ends.dtype == torch.int32, f"ends {ends.shape} {ends.dtype}"
    if isinstance(weight, BlockScaled):
        assert x.is_floating_point(), f"x {x.dtype}"
    else:
        assert x.dtype == weight.dtype, f"x {x.dtype}, weight {weight.dtype}"
        assert not fp8_compute, "a product in float8 needs a block-scaled weight"
    assert pair_input is None or pair_input.shape == x.shape, f"pair_input {pair_input.shape}"
    rows = out_features // max(1, len(pairs))
    for shared in ({len(p.a) for p in pairs if p}, {len(p.b) for p in pairs if p}):
        assert len(shared) < 2, f"one factor for all groups in some pairs alone: {shared}"
    for pair in pairs:
        if pair is None:
            continue
        rank = pair.a.shape[1]
        assert rank <= MAX_RANK, f"rank {rank} of at most {MAX_RANK}"
        assert pair.a.shape[0] in (1, n) and pair.b.shape[0] in (1, n), f"{n} groups"
        assert pair.a.shape[2] == in_features, f"a {pair.a.shape}, weight {weight.shape}"
        assert pair.b.shape[1:] == (rows, rank), f"b {pair.b.shape}, {rows} rows of the weight"
        assert pair.a.dtype == pair.b.dtype == x.dtype, f"{pair.a.dtype}, x {x.dtype}"
