"""The grouped linear, by whichever implementation serves the tensors' device."""

from collections.abc import Sequence

from torch import Tensor

from glm5.ops.block_scaled.weight import BlockScaled
from glm5.ops.grouped.inputs import GroupedPair, check_inputs
from glm5.ops.grouped.reference import grouped_linear_reference
from glm5.ops.precision import FUSED_DTYPES


def grouped_linear(
    x: Tensor,
    weight: Tensor | BlockScaled,
    ends: Tensor,
    pairs: Sequence[GroupedPair | None] = (),
    pair_input: Tensor | None = None,
    *,
    fp8_compute: bool = False,
) -> Tensor:
    """y_i = W_g x_i, and + scale B_g A_g x_i, for each row i of group g (arXiv 2106.09685).

    x [t, in_features]; weight [n, out_features, in_features]; ends [n] int32 on the device of x:
    group g has the rows ends[g - 1] .. ends[g], none if they are equal, and ends[n - 1] = t. The
    host does not read `ends` on a GPU, where the kernels are fused for bf16, fp16 and fp32. pairs:
    nothing, or one entry for each equal part of the out_features, in order, None where a part has
    no pair; ranks of 1 to 128. pair_input [t, in_features]: what the pairs see in place of x, as
    with dropout
    -> y [t, out_features], in the dtype of x. Differentiable in x, pair_input, weight, and both
    factors of every pair; a factor shared by all groups gets the sum over groups; an empty group
    gets zeros. The fused kernels give the same bits every time.

    A block-scaled weight is frozen: the products are those with it rounded to the dtype of x, tile
    by tile, or in float8 with `fp8_compute` (see frozen_linear).
    """
    check_inputs(x, weight, ends, pairs, pair_input, fp8_compute=fp8_compute)
    if not x.is_cuda or x.dtype not in FUSED_DTYPES:
        return grouped_linear_reference(x, weight, ends, pairs, pair_input, fp8_compute=fp8_compute)
    # Triton is imported only where its kernels run.
    from glm5.ops.grouped.autograd import grouped_linear_fused

    return grouped_linear_fused(x, weight, ends, pairs, pair_input, fp8_compute=fp8_compute)
