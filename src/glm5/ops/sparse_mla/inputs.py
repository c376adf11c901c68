"""What sparse_mla accepts, in every backend."""

import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.inputs import are_floats, described, on_one_device


def check_inputs(q: Tensor, kv: Tensor, topk_indices: Tensor, d_v: int) -> None:
    """Raise BackendError for shapes, dtypes and devices that do not fit together.

    q [t_q, h, d_qk], kv [t_k, d_qk] one float dtype, topk_indices [t_q, topk] int32, on one device;
    h >= 1, 0 < d_v <= d_qk.
    """
    fits = (
        q.ndim == 3
        and q.shape[1] > 0
        and kv.ndim == 2
        and kv.shape[1] == q.shape[2]
        and topk_indices.ndim == 2
        and len(topk_indices) == len(q)
        and 0 < d_v <= q.shape[2]
    )
    takes = are_floats(q) and q.dtype == kv.dtype and topk_indices.dtype == torch.int32
    if not fits or not takes or not on_one_device(q, kv, topk_indices):
        raise BackendError(
            "the inputs of sparse_mla do not fit together",
            got=f"{described(q=q, kv=kv, topk_indices=topk_indices)}, d_v {d_v}",
            expected="q [t_q, h, d_qk] and kv [t_k, d_qk] of one float dtype, "
            "topk_indices [t_q, topk] int32, all on one device; h >= 1, 0 < d_v <= d_qk",
        )


def attend_to_nothing(q: Tensor, kv: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
    """out = 0 and lse = -inf of queries without any key, with zero gradients in q and kv."""
    zero = q[..., :0].sum() + kv[..., :0].sum()
    return zero.expand(*q.shape[:2], d_v), torch.full(q.shape[:2], -torch.inf, device=q.device)
