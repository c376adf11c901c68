"""Rotary position embedding (RoFormer, arXiv 2104.09864), interleaved or half-split."""

import torch
from torch import Tensor

from glm5.errors import ConfigError
from glm5.ops.precision import accumulation_dtype


def rope_cos_sin(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles ``positions * theta^(-2i/dim)``, i = 0 .. dim/2 - 1.

    positions [t] integer -> cos, sin, each [t, dim // 2] fp32 on the device of positions.
    Raises ConfigError when dim is odd or not positive.
    """
    if dim <= 0 or dim % 2:
        raise ConfigError("a rotary dimension must be even", got=dim, expected="2, 4, 6, ...")
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = positions.to(torch.float32)[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs (a, b) of x to (a cos - b sin, b cos + a sin).

    x [t, ..., dim] any float dtype; cos, sin [t, dim // 2] fp32, shared by all middle dimensions.
    Pairs are (x[0], x[1]), (x[2], x[3]), ... when interleaved, else (x[i], x[i + dim/2]).
    The result has the shape and dtype of x and keeps every element at its place in both
    conventions (transformers writes its interleaved result half-ordered; q.k is the same).
    Computed in fp32 (fp64 for fp64 x). Differentiable in x.
    """
    check_tables(x, cos, sin)
    t, dim = x.shape[0], x.shape[-1]
    dtype = accumulation_dtype(x)
    table_shape = (t, *[1] * (x.ndim - 2), dim // 2)
    cos, sin = cos.to(dtype).view(table_shape), sin.to(dtype).view(table_shape)
    pair_dim = -1 if interleaved else -2
    pairs = x.to(dtype).unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(pair_dim)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=pair_dim)
    return rotated.flatten(-2).to(x.dtype)


def check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ConfigError unless cos and sin fit x as apply_rope takes them."""
    t, dim = x.shape[0], x.shape[-1]
    if cos.shape != (t, dim // 2) or sin.shape != cos.shape or dim % 2:
        raise ConfigError(
            "cos and sin do not fit x",
            got=f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}",
            expected="x [t, ..., dim] with dim even, cos and sin [t, dim // 2]",
        )
