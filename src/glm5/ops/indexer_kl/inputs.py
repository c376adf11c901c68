"""What the indexer's losses accept, in every backend."""

from collections.abc import Callable

import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.inputs import INDEX_DTYPES, are_floats, described, on_one_device

SumOverRanks = Callable[[Tensor], None]
"""Adds, in place, what the ranks with the other attention heads hold of the same tensor."""


def check_sparse_inputs(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, topk_indices: Tensor, mass: Tensor
) -> None:
    """Raise BackendError for shapes, dtypes and devices of indexer_kl that do not fit together."""
    fits = (
        _index_fits(index_q, index_k, index_weights)
        and topk_indices.ndim == 2
        and len(topk_indices) == len(index_q)
        and topk_indices.dtype == torch.int32
        and mass.shape == topk_indices.shape
        and are_floats(mass)
    )
    if not fits or not on_one_device(index_q, index_k, index_weights, topk_indices, mass):
        raise BackendError(
            "the inputs of indexer_kl do not fit together",
            got=described(
                index_q=index_q,
                index_k=index_k,
                index_weights=index_weights,
                topk_indices=topk_indices,
                mass=mass,
            ),
            expected="[t_q, h_i, d_i], [t_k, d_i], [t_q, h_i] float, [t_q, topk] int32, "
            "[t_q, topk] float, all on one device; h_i >= 1",
        )


def check_dense_inputs(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    starts: Tensor,
    ends: Tensor,
) -> None:
    """Raise BackendError for shapes, dtypes and devices of indexer_kl_dense that do not fit."""
    fits = (
        _index_fits(index_q, index_k, index_weights)
        and q.ndim == 3
        and len(q) == len(index_q)
        and q.shape[1] > 0
        and kv.shape == (len(index_k), q.shape[2])
        and lse.shape == q.shape[:2]
        and are_floats(q, kv, lse)
        and starts.shape == ends.shape == index_q.shape[:1]
        and all(x.dtype in INDEX_DTYPES for x in (starts, ends))
    )
    tensors = {
        "index_q": index_q,
        "index_k": index_k,
        "index_weights": index_weights,
        "q": q,
        "kv": kv,
        "lse": lse,
        "starts": starts,
        "ends": ends,
    }
    if not fits or not on_one_device(*tensors.values()):
        raise BackendError(
            "the inputs of indexer_kl_dense do not fit together",
            got=described(**tensors),
            expected="[t_q, h_i, d_i], [t_k, d_i], [t_q, h_i], [t_q, h, d_qk], [t_k, d_qk], "
            "[t_q, h] float, [t_q], [t_q] int32, all on one device; h_i, h >= 1",
        )


def _index_fits(index_q: Tensor, index_k: Tensor, index_weights: Tensor) -> bool:
    return (
        index_q.ndim == 3
        and index_q.shape[1] > 0
        and index_weights.shape == index_q.shape[:2]
        and index_k.ndim == 2
        and index_k.shape[1] == index_q.shape[2]
        and are_floats(index_q, index_k, index_weights)
    )
