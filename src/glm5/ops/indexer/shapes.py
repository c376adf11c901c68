"""The shapes that select_topk takes, in every backend."""

from torch import Tensor

from glm5.errors import BackendError


def check_shapes(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> None:
    """Raise BackendError unless the inputs of select_topk fit together."""
    shapes = [tuple(x.shape) for x in (q, k, weights, starts, ends)]
    t_q = len(q)
    fits = q.ndim == 3 and shapes[1:] == [(len(k), q.shape[2]), (t_q, q.shape[1]), (t_q,), (t_q,)]
    if not fits or topk < 0:
        raise BackendError(
            "the inputs of select_topk do not fit together",
            got=f"q, k, weights, starts, ends {shapes}, topk {topk}",
            expected="q [t_q, h, d], k [t_k, d], weights [t_q, h], starts, ends [t_q], topk >= 0",
        )
