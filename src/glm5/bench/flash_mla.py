"""FlashMLA's forward of the attention over selected keys, with our backward."""

from inspect import signature

from flash_mla import flash_mla_sparse_fwd
from torch import Tensor
from torch.nn.functional import pad

from glm5.ops.sparse_mla.hopper import HopperKernels
from glm5.ops.sparse_mla.portable import PortableKernels
from glm5.ops.sparse_mla.selection import Selection

# FlashMLA takes this many heads, or twice as many.
_HEADS = 64
# The package sgl-flash-mla keeps the kernels for Hopper behind this argument.
_OLDER_KERNELS = "use_legacy"


def flash_mla_fwd(
    q: Tensor, kv: Tensor, selection: Selection, softmax_scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    """As HopperKernels.forward, with at least one key in each row.

    q [t_q, h, 576], kv [t_k, 576] bf16, d_v = 512, rows of a multiple of 128 indices. Heads are
    padded with zeros to 64 or 128.
    """
    num_heads = q.shape[1]
    if num_heads % _HEADS:
        q = pad(q, (0, 0, 0, -num_heads % _HEADS))
    takes = signature(flash_mla_sparse_fwd).parameters
    out, _, lse = flash_mla_sparse_fwd(
        q,
        kv[:, None],
        selection.indices[:, None],
        softmax_scale,
        d_v,
        topk_length=selection.lengths,
        **({_OLDER_KERNELS: True} if _OLDER_KERNELS in takes else {}),
    )
    return out[:, :num_heads].contiguous(), lse[:, :num_heads].contiguous()


class FlashMlaKernels(HopperKernels):
    """FlashMLA forward and our backward, one query a tile."""

    select = staticmethod(PortableKernels.select)
    forward = staticmethod(flash_mla_fwd)
