"""Row-by-row formulas, written without the code under test."""

import math

import torch
from torch import Tensor


def rank_key(score: float, position: int) -> tuple[bool, float, int]:
    """Sorts the best key first: NaN, then the higher score, then the lower position."""
    is_nan = math.isnan(score)
    return (not is_nan, 0.0 if is_nan else -score, position)


def select(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    """Top-k of each row by sorting Python floats."""
    rows = []
    for row, start, end in zip(scores.tolist(), starts.tolist(), ends.tolist(), strict=True):
        best = sorted(range(start, end), key=lambda j, row=row: rank_key(row[j], j))[:topk]
        rows.append(sorted(best) + [-1] * (topk - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(len(scores), topk)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """All heads at once."""
    return (torch.einsum("thd,sd->ths", q, k).relu() * weights[..., None]).sum(1)


def attention(
    q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    """Softmax over the gathered keys of each row, in the dtype of q, by plain autograd."""
    out, lse = [], []
    for q_row, indices in zip(q, topk_indices.tolist(), strict=True):
        keys = kv[[j for j in indices if j >= 0]]
        logits = (q_row @ keys.T) * softmax_scale
        out.append(torch.softmax(logits, dim=-1) @ keys[:, :d_v])
        lse.append(torch.logsumexp(logits.double(), dim=-1))
    return torch.stack(out), torch.stack(lse)


def mass(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float) -> Tensor:
    """The probabilities of each row's keys, summed over the heads, in fp64; 0 without a key."""
    sums = torch.zeros(topk_indices.shape, dtype=torch.float64)
    for total, q_row, row in zip(sums, q.detach().double(), topk_indices, strict=True):
        keys = kv.detach().double()[row[row >= 0].long()]
        total[row >= 0] = torch.softmax(q_row @ keys.T * softmax_scale, -1).sum(0)
    return sums


def kl(scores: Tensor, q: Tensor, kv: Tensor, masks: Tensor, softmax_scale: float) -> Tensor:
    """KL between the head-averaged attention and the softmax of the scores, row by row."""
    rows = []
    for score, q_row, mask in zip(scores, q, masks, strict=True):
        if not mask.any():
            rows.append(score.sum() * 0)
            continue
        target = torch.softmax((q_row @ kv[mask].T) * softmax_scale, dim=-1).mean(0).detach()
        log_probs = torch.log_softmax(score[mask], dim=-1)
        rows.append((target * (target.log() - log_probs)).sum())
    return torch.stack(rows)


def causal_bounds(*lengths: int) -> tuple[Tensor, Tensor]:
    """Starts and ends of documents of these lengths."""
    starts = [sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)]
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.arange(1, sum(lengths) + 1, dtype=torch.int32),
    )


def random_selection(t_q: int, t_k: int, topk: int) -> Tensor:
    """A random number of distinct keys for each row, ascending, -1 at the tail; row 0 has none."""
    rows = torch.full((t_q, topk), -1, dtype=torch.int32)
    for i in range(1, t_q):
        num_keys = int(torch.randint(0, min(topk, t_k) + 1, ()))
        rows[i, :num_keys] = torch.randperm(t_k)[:num_keys].sort().values.int()
    return rows
