"""What fused kernels of an attention are to its autograd functions."""

from typing import Protocol

import torch
from torch import Tensor

from glm5.ops.sparse_mla.selection import Selection
from glm5.ops.sparse_mla.tile_probs import TileProbs, TileShape


class Kernels(Protocol):
    """Forward and backward launchers; portable_fwd and portable_bwd say what they take."""

    def select(self, topk_indices: Tensor, h: int, num_keys: int) -> Selection:
        """topk_indices [t_q, topk] in the form that the other functions take, for h heads."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        selection: Selection,
        softmax_scale: float,
        d_v: int,
    ) -> tuple[Tensor, Tensor]:
        """-> out, lse."""

    def forward_into(
        self,
        q: Tensor,
        kv: Tensor,
        selection: Selection,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
        kept: TileProbs | None,
    ) -> None:
        """Write out, lse, and the probabilities that they are made of, where they are kept."""

    def tile_shape(self, q: Tensor, d_v: int) -> TileShape:
        """Of the probabilities that forward_into keeps."""

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        kv: Tensor,
        selection: Selection,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """-> grad_q, grad_kv, whose last bits change from run to run."""

    def backward_rows(
        self,
        grad_out: Tensor,
        q: Tensor,
        kv: Tensor,
        selection: Selection,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        grad_q: Tensor,
        rows: Tensor,
    ) -> None:
        """Write grad_q, and each query's terms of its keys' gradients, from each part of the heads.

        rows [rows of the selection, num_row_parts, width, d_qk]; what belongs to no key is
        arbitrary.
        """

    def num_row_parts(self, q: Tensor, d_v: int) -> int:
        """How many programs share the heads of a row of the selection."""

    @property
    def shuffles_rows(self) -> bool:
        """Whether backward_rows writes columns in the order of hopper_grad_keys.store_grad_keys."""


class AllocatesResults:
    """The `forward` of kernels that write into tensors."""

    def forward(
        self: Kernels,
        q: Tensor,
        kv: Tensor,
        selection: Selection,
        softmax_scale: float,
        d_v: int,
    ) -> tuple[Tensor, Tensor]:
        """-> out, lse."""
        out = q.new_empty(*q.shape[:2], d_v)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.forward_into(q, kv, selection, softmax_scale, out, lse, None)
        return out, lse
