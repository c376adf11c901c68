"""Tile sizes of the plain Triton kernels."""

from typing import Any, NamedTuple, Self

import torch
import triton
from torch import Tensor

_SMALLEST_DOT = 16


class PortableTiles(NamedTuple):
    """Heads and keys of one tile, padded widths of the value part and of the tail behind it."""

    heads: int
    keys: int
    width_v: int
    width_tail: int
    num_warps: int
    num_stages: int
    upcast: bool

    @classmethod
    def forward(cls, q: Tensor, d_v: int) -> Self:
        """What fits into shared memory, and was fastest on an H200, for q [t_q, h, d_qk]."""
        heads = min(64, _padded(q.shape[1]))
        return cls._choose(q, d_v, heads, keys=64)

    @classmethod
    def backward(cls, q: Tensor, d_v: int) -> Self:
        """Smaller than forward: the gradients of a tile are held too."""
        heads = min(32, _padded(q.shape[1]))
        return cls._choose(q, d_v, heads, keys=heads)

    @classmethod
    def _choose(cls, q: Tensor, d_v: int, heads: int, keys: int) -> Self:
        is_fp32 = q.dtype == torch.float32
        return cls(
            heads=_SMALLEST_DOT if is_fp32 else heads,
            keys=_SMALLEST_DOT if is_fp32 else keys,
            width_v=_padded(d_v),
            width_tail=_padded(q.shape[2] - d_v),
            num_warps=4 if heads == _SMALLEST_DOT else 8,
            num_stages=1 if is_fp32 else 2,
            # CPU tensors only reach Triton's interpreter, whose bf16 products are wrong.
            upcast=not q.is_cuda,
        )

    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments of a kernel launch."""
        return {
            "BLOCK_H": self.heads,
            "BLOCK_N": self.keys,
            "BLOCK_V": self.width_v,
            "BLOCK_T": self.width_tail,
            "UPCAST": self.upcast,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def _padded(size: int) -> int:
    return max(_SMALLEST_DOT, triton.next_power_of_2(size))
