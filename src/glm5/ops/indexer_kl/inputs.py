"""What indexer_kl accepts, in every backend."""

from collections.abc import Callable

from torch import Tensor

from glm5.errors import BackendError

SumOverRanks = Callable[[Tensor], None]
"""Adds, in place, what the ranks with the other attention heads hold of the same tensor."""


def check_inputs(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, q: Tensor, kv: Tensor, lse: Tensor
) -> None:
    """Raise BackendError unless the tensors of indexer_kl fit together."""
    t_q, t_k = len(q), len(kv)
    fits = (
        index_q.ndim == q.ndim == 3
        and len(index_q) == t_q
        and index_weights.shape == index_q.shape[:2]
        and index_k.shape == (t_k, index_q.shape[2])
        and kv.shape == (t_k, q.shape[2])
        and lse.shape == q.shape[:2]
    )
    if not fits:
        tensors = (index_q, index_k, index_weights, q, kv, lse)
        raise BackendError(
            "the inputs of indexer_kl do not fit together",
            got=f"index_q, index_k, index_weights, q, kv, lse {[tuple(x.shape) for x in tensors]}",
            expected="[t_q, h_i, d_i], [t_k, d_i], [t_q, h_i], [t_q, h, d_qk], [t_k, d_qk], "
            "[t_q, h]",
        )


def check_key_set(
    topk_indices: Tensor | None, starts: Tensor | None, ends: Tensor | None, *, t_q: int
) -> None:
    """Raise BackendError unless either topk_indices or both bounds are given, a row a query."""
    is_sparse = topk_indices is not None and starts is None and ends is None
    is_dense = topk_indices is None and starts is not None and ends is not None
    given = {"topk_indices": topk_indices, "starts": starts, "ends": ends}
    shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
    if is_sparse != is_dense and all(shape[0] == t_q for shape in shapes.values()):
        return
    raise BackendError(
        "indexer_kl needs exactly one key set, with one row for each query",
        got=f"{shapes} for {t_q} queries",
        expected="topk_indices [t_q, topk], or both starts and ends [t_q]",
    )
