"""Rope on some dimensions of a head, by whichever implementation serves the tensors' device."""

import torch
from torch import Tensor

from glm5.ops.precision import FUSED_DTYPES
from glm5.ops.rope import apply_rope, check_tables


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, first: bool) -> Tensor:
    """y = [rope(x_a), x_b], or [x_a, rope(x_b)] unless `first`; rope as apply_rope does it.

    x [t, ..., d] any float dtype and any strides; cos, sin [t, dim // 2] fp32, whose dim <= d says
    how many dimensions rotate -> y [t, ..., d], a new tensor in the dtype of x. Computed in fp32
    (fp64 for fp64 x) and rounded once. Differentiable in x. On a GPU one kernel for bf16, fp16 and
    fp32, with the bits of the reference. Raises ConfigError when cos and sin do not fit.
    """
    check_tables(_rotating(x, cos, first=first), cos, sin)
    if not x.is_cuda or x.dtype not in FUSED_DTYPES:
        return rotate_reference(x, cos, sin, interleaved=interleaved, first=first)
    # Triton is imported only where its kernels run.
    from glm5.ops.triton_rotation import rotate_fused

    return rotate_fused(x, cos, sin, interleaved=interleaved, first=first)


def rotate_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, first: bool
) -> Tensor:
    """See rotate."""
    rotated = apply_rope(_rotating(x, cos, first=first), cos, sin, interleaved=interleaved)
    dim = rotated.shape[-1]
    parts = [rotated, x[..., dim:]] if first else [x[..., : x.shape[-1] - dim], rotated]
    return torch.cat(parts, dim=-1)


def _rotating(x: Tensor, cos: Tensor, *, first: bool) -> Tensor:
    dim = 2 * cos.shape[-1]
    return x[..., :dim] if first else x[..., max(0, x.shape[-1] - dim) :]
