"""What the indexer's losses accept, in every backend."""

from collections.abc import Callable

from torch import Tensor

from glm5.errors import BackendError

SumOverRanks = Callable[[Tensor], None]
"""Adds, in place, what the ranks with the other attention heads hold of the same tensor."""


def check_sparse_inputs(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, topk_indices: Tensor, mass: Tensor
) -> None:
    """Raise BackendError unless the tensors of indexer_kl fit together."""
    fits = (
        _index_fits(index_q, index_k, index_weights)
        and topk_indices.ndim == 2
        and len(topk_indices) == len(index_q)
        and mass.shape == topk_indices.shape
    )
    if not fits:
        tensors = (index_q, index_k, index_weights, topk_indices, mass)
        raise BackendError(
            "the inputs of indexer_kl do not fit together",
            got="index_q, index_k, index_weights, topk_indices, mass "
            f"{[tuple(x.shape) for x in tensors]}",
            expected="[t_q, h_i, d_i], [t_k, d_i], [t_q, h_i], [t_q, topk], [t_q, topk]",
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
    """Raise BackendError unless the tensors of indexer_kl_dense fit together."""
    t_q, t_k = len(index_q), len(index_k)
    fits = (
        _index_fits(index_q, index_k, index_weights)
        and q.ndim == 3
        and len(q) == t_q
        and kv.shape == (t_k, q.shape[2])
        and lse.shape == q.shape[:2]
        and starts.shape == ends.shape == (t_q,)
    )
    if not fits:
        tensors = (index_q, index_k, index_weights, q, kv, lse, starts, ends)
        raise BackendError(
            "the inputs of indexer_kl_dense do not fit together",
            got="index_q, index_k, index_weights, q, kv, lse, starts, ends "
            f"{[tuple(x.shape) for x in tensors]}",
            expected="[t_q, h_i, d_i], [t_k, d_i], [t_q, h_i], [t_q, h, d_qk], [t_k, d_qk], "
            "[t_q, h], [t_q], [t_q]",
        )


def _index_fits(index_q: Tensor, index_k: Tensor, index_weights: Tensor) -> bool:
    return (
        index_q.ndim == 3
        and index_weights.shape == index_q.shape[:2]
        and index_k.shape == (len(index_k), index_q.shape[2])
    )
