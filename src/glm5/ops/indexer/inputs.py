"""What select_topk accepts, in every backend."""

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.inputs import INDEX_DTYPES, are_floats, described, on_one_device


def check_index_inputs(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> None:
    """Raise BackendError for shapes, dtypes and devices that do not fit together."""
    fits = (
        q.ndim == 3
        and q.shape[1] > 0
        and k.ndim == 2
        and k.shape[1] == q.shape[2]
        and weights.shape == q.shape[:2]
        and starts.shape == ends.shape == q.shape[:1]
        and topk >= 0
    )
    takes = are_floats(q, k, weights) and all(x.dtype in INDEX_DTYPES for x in (starts, ends))
    if not fits or not takes or not on_one_device(q, k, weights, starts, ends):
        got = described(q=q, k=k, weights=weights, starts=starts, ends=ends)
        raise BackendError(
            "the inputs of select_topk do not fit together",
            got=f"{got}, topk {topk}",
            expected="q [t_q, h, d], k [t_k, d], weights [t_q, h] float, starts, ends [t_q] int32, "
            "all on one device; h >= 1, topk >= 0",
        )
