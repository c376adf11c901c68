"""A linear whose frozen weight stays in float8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.ops.block_scaled import BlockScaled
from glm5.ops.grouped import GroupedPair, grouped_linear


def frozen_linear(
    x: Tensor,
    weight: BlockScaled,
    pairs: Sequence[GroupedPair | None] = (),
    pair_input: Tensor | None = None,
    *,
    fp8_compute: bool = False,
) -> Tensor:
    """y = x W^T for a frozen block-scaled W; the backward reads W in float8 again.

    x [.., in] floating; weight [out, in]; pairs, pair_input [.., in]: see grouped_linear, of one
    group -> y [.., out] in the dtype of x. Differentiable in x, pair_input and the pairs. With
    `fp8_compute` both x and the gradient of y are quantised by pieces of a row (see quantise_rows)
    and multiplied in float8, summed in fp32; without it the product is that with W rounded to the
    dtype of x. On a GPU no copy of W is made in either.
    """
    rows = x.reshape(-1, x.shape[-1])
    seen = None if pair_input is None else pair_input.reshape(rows.shape)
    stack = BlockScaled(weight.values[None], weight.scales[None], weight.block)
    ends = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
    y = grouped_linear(rows, stack, ends, pairs, seen, fp8_compute=fp8_compute)
    return y.view(*x.shape[:-1], weight.shape[0])
