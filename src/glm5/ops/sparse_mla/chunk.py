"""The arithmetic of attention on one chunk of query rows, as plain matmuls over masked keys."""

import torch
from torch import Tensor


def masked_logits(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """q . kv where mask, -inf elsewhere: q [c, h, d], kv [n, d], mask [c, n] bool -> [c, h, n]."""
    logits = (q.flatten(0, 1) @ kv.t()).unflatten(0, q.shape[:2])
    return logits.masked_fill_(~mask[:, None, :], float("-inf"))


def probabilities_(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), in place: logits [c, h, n], lse [c, h]; rows without a key become 0."""
    finite = lse.masked_fill(lse == float("-inf"), 0)
    return logits.sub_(finite[..., None]).exp_()


def attend(q: Tensor, kv: Tensor, mask: Tensor, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """out = softmax(q . kv) kv[:, :d_v] over the masked keys, the logits' log-sum-exp, the softmax.

    q [c, h, d] scaled, kv [n, d], mask [c, n] bool -> out [c, h, d_v], lse [c, h], [c, h, n].
    """
    logits = masked_logits(q, kv, mask)
    lse = torch.logsumexp(logits, dim=-1)
    probs = probabilities_(logits, lse)
    return (probs.flatten(0, 1) @ kv[:, :d_v]).unflatten(0, q.shape[:2]), lse, probs


def attend_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, mask: Tensor, grad_kv: Tensor
) -> Tensor:
    """Add the chunk's gradient to grad_kv [n, d], and return the gradient in q [c, h, d].

    With p = exp(q . kv - lse) and dp = grad_out . v, the gradient of the logits is
    p (dp - sum_d grad_out out) (FlashAttention, arXiv 2205.14135, appendix B).
    grad_out, out [c, h, d_v], lse [c, h], q [c, h, d] scaled, kv [n, d], mask [c, n] bool.
    """
    d_v = grad_out.shape[-1]
    row_term = (grad_out * out).sum(-1).flatten()[:, None]
    grad_rows, q_rows = grad_out.flatten(0, 1), q.flatten(0, 1)
    probs = probabilities_(masked_logits(q, kv, mask), lse).flatten(0, 1)
    grad_kv[:, :d_v].addmm_(probs.t(), grad_rows)
    grad_logits = (grad_rows @ kv[:, :d_v].t()).sub_(row_term).mul_(probs)
    grad_kv.addmm_(grad_logits.t(), q_rows)
    return (grad_logits @ kv).unflatten(0, q.shape[:2])
