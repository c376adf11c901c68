"""Log-probabilities of given tokens from logits whose vocabulary is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.errors import DataError

# A chunk of 512 tokens of GLM-5's 154,880 entries takes 317 MB in fp32.
CHUNK_TOKENS = 512


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """(log softmax(logits / temperature) at the targets, entropy of that distribution).

    logits [t, vocab / tp] of a float dtype: this rank's part of the vocabulary, the parts in the
    order of the ranks of `group`. There is no padding in it: layouts divide the vocabulary.
    targets [t] integer, the same on all ranks of the group: ids of the whole vocabulary, or -1
    where nothing is asked for: such a row is 0 in both results, has no gradient, and costs nothing.
    temperature > 0.

    Both results are [t] fp32, in nats, equal on all ranks; only the first one has a gradient. Rows
    are converted to fp32 `chunk_tokens` at a time, also in the backward pass, which computes the
    softmax again and does not communicate. Collective over `group`; waits for a GPU.

    Raises:
        DataError: a target is outside the vocabulary.
    """
    assert temperature > 0 and chunk_tokens > 0
    assert logits.dim() == 2 and targets.shape == logits.shape[:1]
    _check_targets(targets, logits.shape[1] * dist.get_world_size(group))
    log_probs, entropy = _TokenLogProbs.apply(logits, targets, temperature, group, chunk_tokens)
    return log_probs, entropy


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        rows = (targets >= 0).nonzero().flatten()
        here = _local_ids(targets[rows], logits.shape[1], group)
        # of each row: log-probability, entropy, largest logit, log of the sum
        found = logits.new_empty(4, len(rows), dtype=torch.float32)
        for some, ids, out in _chunks(chunk_tokens, rows, here, found):
            out.copy_(_forward_chunk(_scaled(logits[some], temperature), ids, group))
        ctx.save_for_backward(logits, rows, here, *found[2:])
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        log_probs, entropy = (_spread(values, rows, len(targets)) for values in found[:2])
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        """d log p[target] / d logit[j] = ((1 if j is the target, else 0) - p[j]) / temperature."""
        logits, rows, here, *row_values = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        scale = grad[rows] / ctx.temperature
        for some, ids, largest, log_sum, factor in _chunks(
            ctx.chunk_tokens, rows, here, *row_values, scale
        ):
            probs = _scaled(logits[some], ctx.temperature)
            probs.sub_(largest[:, None]).sub_(log_sum[:, None]).exp_()
            out = probs.mul_(-factor[:, None])
            at_target = torch.where(ids >= 0, factor, 0)
            out.scatter_add_(1, ids.clamp(min=0)[:, None], at_target[:, None])
            grad_logits[some] = out.to(grad_logits.dtype)
        return grad_logits, None, None, None, None


def _forward_chunk(scaled: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[4, n] of n rows; scaled [n, vocab / tp] fp32 is overwritten, ids [n] are _local_ids."""
    largest = scaled.amax(dim=1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scaled.sub_(largest[:, None])
    at_target = scaled.gather(1, ids.clamp(min=0)[:, None])[:, 0]
    at_target = torch.where(ids >= 0, at_target, 0)
    exps = scaled.exp()
    # sum exp(z), sum z exp(z) and z at the target, in one message
    sums = torch.stack([exps.sum(1), scaled.mul_(exps).sum(1), at_target])
    dist.all_reduce(sums, group=group)
    total, weighted, at_target = sums
    log_sum = total.log()
    return torch.stack([at_target - log_sum, log_sum - weighted / total, largest, log_sum])


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Equal parts of at most `size` along each tensor's last dimension; none where it is empty."""
    for start in range(0, tensors[0].shape[-1], size):
        yield tuple(tensor[..., start : start + size] for tensor in tensors)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A copy of its own in fp32, which may be overwritten."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _local_ids(targets: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Where this rank's part of the vocabulary has each target, -1 where another rank has it."""
    local = targets.long() - dist.get_rank(group) * size
    return torch.where((local >= 0) & (local < size), local, -1)


def _spread(values: Tensor, rows: Tensor, length: int) -> Tensor:
    """[length], the values at the rows, else 0."""
    return values.new_zeros(length).index_copy_(0, rows, values)


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    if targets.numel() and (largest := int(targets.max())) >= vocab_size:
        raise DataError(
            "a token is outside the vocabulary",
            got=f"id {largest}",
            expected=f"ids below {vocab_size}",
            remedy="let the engine sample from the same model and tokenizer",
        )
