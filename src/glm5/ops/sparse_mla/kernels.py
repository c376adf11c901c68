"""Which fused kernels compute a given attention."""

from typing import Protocol

import torch
from torch import Tensor

from glm5.ops.devices import is_hopper
from glm5.ops.sparse_mla import portable_bwd, portable_fwd
from glm5.ops.sparse_mla.selection import Selection, one_by_one
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


class PortableKernels(AllocatesResults):
    """Plain Triton: any size."""

    @staticmethod
    def select(topk_indices: Tensor, h: int, num_keys: int) -> Selection:
        """Every query by itself."""
        del h, num_keys
        return one_by_one(topk_indices)

    forward_into = staticmethod(portable_fwd.sparse_mla_fwd_into)
    tile_shape = staticmethod(portable_fwd.tile_shape)
    backward = staticmethod(portable_bwd.sparse_mla_bwd)
    backward_rows = staticmethod(portable_bwd.sparse_mla_bwd_rows)
    num_row_parts = staticmethod(portable_bwd.num_head_parts)
    shuffles_rows = False


def choose_kernels(q: Tensor, d_v: int) -> Kernels:
    """Gluon on Hopper for the sizes of GLM-5 in bf16, plain Triton for everything else."""
    if not is_hopper(q) or (q.dtype, q.shape[2], d_v) != (torch.bfloat16, 576, 512):
        return PortableKernels()
    # Gluon is experimental: it is imported only where its kernels run.
    from glm5.ops.sparse_mla.hopper import HopperKernels

    return HopperKernels()
