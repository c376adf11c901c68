"""The operations in plain PyTorch, in the dtype of their inputs, with autograd: the peer that
everyone has."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glm5.ops.grouped import GroupedPair

# Query rows of one block: its logits are made again in the backward pass, so memory is bounded.
_BLOCK_ROWS = 256


def sparse_mla(
    q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    """As the backends' sparse_mla: masked logits against all keys."""

    def block(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        logits = _masked_logits(q, kv, _mask(indices, len(kv)), softmax_scale)
        return torch.softmax(logits, -1) @ kv[:, :d_v], torch.logsumexp(logits.float(), -1)

    out, lse = _by_blocks(block, (q,), (kv,), (topk_indices,))
    return out, lse


def sparse_mla_with_mass(
    q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float, d_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As the backends' sparse_mla_with_mass: the same probabilities, summed over the heads."""

    def block(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = _masked_logits(q, kv, _mask(indices, len(kv)), softmax_scale)
        probs = torch.softmax(logits, -1)
        # A row without keys is all NaN.
        mass = probs.detach().sum(1).nan_to_num(0).gather(1, indices.clamp(min=0).long())
        lse = torch.logsumexp(logits.float(), -1)
        return probs @ kv[:, :d_v], lse, mass.masked_fill(indices < 0, 0).float()

    out, lse, mass = _by_blocks(block, (q,), (kv,), (topk_indices,))
    return out, lse, mass


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], softmax_scale: float
) -> Tensor:
    """As glm5.ops.causal_attention: all logits of one document at a time, under a mask."""

    def document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("thd,shd->hts", q, k) * softmax_scale
        future = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        probs = torch.softmax(logits.masked_fill(future, -torch.inf), -1)
        return torch.einsum("hts,shd->thd", probs, v)

    parts = (x.split(list(lengths)) for x in (q, k, v))
    return torch.cat([document(*part) for part in zip(*parts, strict=True)])


def indexer_kl(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    topk_indices: Tensor,
    mass: Tensor,
) -> Tensor:
    """As the backends' indexer_kl, with a plain softmax over all keys."""

    def block(
        index_q: Tensor, weights: Tensor, mass: Tensor, index_k: Tensor, indices: Tensor
    ) -> tuple[Tensor]:
        mask, keys = _mask(indices, len(index_k)), indices.long().where(indices >= 0, len(index_k))
        target = mass.new_zeros(len(mass), len(index_k) + 1).scatter_(1, keys, mass)[:, :-1]
        target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
        similarity = torch.relu(torch.einsum("thd,sd->ths", index_q, index_k))
        scores = torch.einsum("ths,th->ts", similarity, weights.to(similarity.dtype)).float()
        log_probs = torch.log_softmax(scores.masked_fill(~mask, -torch.inf), -1)
        terms = torch.xlogy(target, target) - target * log_probs.masked_fill(~mask, 0)
        return (terms.sum(-1),)

    return _by_blocks(block, (index_q, weights, mass), (index_k,), (topk_indices,))[0]


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, pairs: Sequence[GroupedPair] = ()
) -> Tensor:
    """As glm5.ops.grouped.grouped_linear, every product by itself; ranks are multiples of 8."""
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if not pairs:
        return y
    deltas = [_by_group(_by_group(x, p.a, ends), p.b, ends) * p.scale for p in pairs]
    return y + torch.cat(deltas, -1)


def _by_group(x: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    if len(factor) == 1:
        return F.linear(x, factor[0])
    return F.grouped_mm(x, factor.transpose(1, 2), offs=ends)


def select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """The selection of one causal document: a matmul over each block's prefix, and torch.topk."""
    del starts
    num_tokens, num_heads = q.shape[:2]
    num_rows = max(1, 2**29 // (num_heads * len(k) * 2))
    topk_indices = torch.full((num_tokens, topk), -1, dtype=torch.int32, device=q.device)
    positions = torch.arange(len(k), dtype=torch.int32, device=q.device)
    for first in range(0, num_tokens, num_rows):
        rows = slice(first, min(first + num_rows, num_tokens))
        scores = index_scores(q[rows], k[: rows.stop], weights[rows])
        scores.masked_fill_(positions[: rows.stop] >= ends[rows, None], -torch.inf)
        best = scores.topk(min(topk, rows.stop), dim=-1, sorted=False)
        topk_indices[rows, : best.indices.shape[1]] = best.indices.int().masked_fill_(
            best.values == -torch.inf, -1
        )
    return topk_indices


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[t_q, t_k] fp32 from products rounded to the dtype of q."""
    similarity = torch.relu_((q.flatten(0, 1) @ k.t()).view(*q.shape[:2], len(k)))
    return torch.bmm(weights[:, None].to(q.dtype), similarity)[:, 0].float()


def _by_blocks(
    block: Callable[..., tuple[Tensor, ...]],
    by_row: tuple[Tensor, ...],
    whole: tuple[Tensor, ...],
    indices: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    parts = []
    for first in range(0, len(by_row[0]), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        arguments = (*(x[rows] for x in by_row), *whole, *(x[rows] for x in indices))
        parts.append(checkpoint(block, *arguments, use_reentrant=False))
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def _mask(indices: Tensor, num_keys: int) -> Tensor:
    mask = torch.zeros(len(indices), num_keys + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(1, indices.long().where(indices >= 0, num_keys), True)
    return mask[:, :-1]


def _masked_logits(q: Tensor, kv: Tensor, mask: Tensor, softmax_scale: float) -> Tensor:
    logits = (q.flatten(0, 1) @ kv.t()).view(*q.shape[:2], len(kv)) * softmax_scale
    return logits.masked_fill(~mask[:, None], float("-inf"))
