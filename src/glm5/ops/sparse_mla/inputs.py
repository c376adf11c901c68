"""What sparse_mla accepts, in every backend that checks its own inputs."""

import torch
from torch import Tensor

from glm5.errors import BackendError


def check_inputs(q: Tensor, kv: Tensor, topk_indices: Tensor, d_v: int) -> None:
    """Raise BackendError for shapes and dtypes that do not fit together.

    q [t_q, h, d_qk], kv [t_k, d_qk] one dtype, topk_indices [t_q, topk] int32, 0 < d_v <= d_qk.
    """
    fits = (
        q.ndim == 3
        and kv.shape == (len(kv), q.shape[2])
        and topk_indices.ndim == 2
        and len(topk_indices) == len(q)
        and 0 < d_v <= q.shape[2]
    )
    if not fits or q.dtype != kv.dtype or topk_indices.dtype != torch.int32:
        tensors = {"q": q, "kv": kv, "topk_indices": topk_indices}
        got = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items())
        raise BackendError(
            "the inputs of sparse_mla do not fit together",
            got=f"{got}, d_v {d_v}",
            expected="q [t_q, h, d_qk] and kv [t_k, d_qk] of one dtype, "
            "topk_indices [t_q, topk] int32, 0 < d_v <= d_qk",
        )


def attend_to_nothing(q: Tensor, kv: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
    """out = 0 and lse = -inf of queries without any key, with zero gradients in q and kv."""
    zero = q[..., :0].sum() + kv[..., :0].sum()
    return zero.expand(*q.shape[:2], d_v), torch.full(q.shape[:2], -torch.inf, device=q.device)
