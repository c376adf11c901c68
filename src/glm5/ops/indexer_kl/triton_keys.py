"""The keys of each query row, as the fused kernels read them: listed, or a range."""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.sparse_mla.row_lengths import row_lengths


class KeyRows(NamedTuple):
    """Row i uses num_keys[i] places: the keys indices[i] (-1 = none), or starts[i] and on.

    indices [t_q, topk] int32, contiguous, or None; starts, num_keys [t_q] int32. width: the most
    places of a row.
    """

    indices: Tensor | None
    starts: Tensor
    num_keys: Tensor
    width: int

    @classmethod
    def listed(cls, topk_indices: Tensor) -> Self:
        """The selected keys of topk_indices [t_q, topk] int32; a tail of -1 costs nothing."""
        indices = topk_indices.contiguous()
        lengths = row_lengths(indices)
        return cls(indices, lengths, lengths, indices.shape[1])

    @classmethod
    def ranges(cls, starts: Tensor, ends: Tensor, t_k: int) -> Self:
        """All keys in [starts, ends), each [t_q] int32; bounds outside t_k keys are cut."""
        starts = starts.clamp(0, t_k).int()
        num_keys = (ends.clamp(0, t_k).int() - starts).clamp_(min=0)
        # Rows of whole 512-byte lines keep loads aligned, and kernels free of recompilation.
        return cls(None, starts, num_keys, -(-t_k // 128) * 128)

    def rows(self, rows: slice) -> Self:
        """The same for some of the rows."""
        indices = None if self.indices is None else self.indices[rows]
        return self._replace(
            indices=indices, starts=self.starts[rows], num_keys=self.num_keys[rows]
        )

    def kernel_arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """indices, starts, num_keys and width of a kernel; `starts` stands in for no indices."""
        indices = self.starts if self.indices is None else self.indices
        return indices, self.starts, self.num_keys, self.width


@triton.jit
def load_keys(indices_ptr, starts_ptr, row, columns, num_keys, width, IS_LISTED: tl.constexpr):
    """The keys at these places of the row, -1 where there is none."""
    if IS_LISTED:
        return tl.load(indices_ptr + row * width + columns, mask=columns < num_keys, other=-1)
    else:
        return tl.where(columns < num_keys, tl.load(starts_ptr + row) + columns, -1)


def padded(size: int) -> int:
    """The tile width that holds so many: a power of two that tl.dot takes."""
    return max(16, triton.next_power_of_2(size))


def is_interpreted(x: Tensor) -> bool:
    """Whether the kernels run in Triton's interpreter, whose bf16 products are wrong."""
    return not x.is_cuda


def is_small_tile(index_q: Tensor) -> bool:
    """Whether few keys fit at a time beside index_q [t_q, h_i, d_i].

    An fp32 product lives in registers, and shared memory holds queries and keys in full width.
    """
    num_heads, head_dim = index_q.shape[1:]
    return index_q.dtype == torch.float32 or padded(num_heads) * padded(head_dim) > 64 * 128


def index_sizes(index_q: Tensor) -> dict[str, Any]:
    """Constants of a kernel on index_q [t_q, h_i, d_i]."""
    num_heads, head_dim = index_q.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": padded(num_heads),
        "BLOCK_D": padded(head_dim),
        "UPCAST": is_interpreted(index_q),
    }
