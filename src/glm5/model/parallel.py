"""The collectives of the attention layer, each with the backward that its use needs."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor, nn


def gather_rows(x: Tensor, batch: int, *, partial_grad: bool) -> Tensor:
    """x [b * s / tp, ...] of the tensor-parallel ranks' own tokens -> [b * s, ...] of all.

    Backward: with `partial_grad` every rank holds a part of the gradient (of its heads or queries),
    and the parts are summed; else all ranks hold the same one and each takes its tokens.
    """
    return _gather(x, batch, parallel_state.get_tensor_model_parallel_group(), partial_grad)


def gather_keys(x: Tensor, batch: int, *, partial_grad: bool = True) -> Tensor:
    """x [b * s / (cp * tp), ...], the keys of a rank's own tokens -> [b * s, ...] of all.

    Backward: a key's gradient is summed over the ranks whose queries used it; without
    `partial_grad` the tensor-parallel ranks have the same queries, and so the same gradient.
    """
    x = gather_rows(x, batch, partial_grad=partial_grad)
    return _gather(x, batch, parallel_state.get_context_parallel_group(), partial_grad=True)


def heads_to_tokens(x: Tensor, batch: int) -> Tensor:
    """x [b * s, h / tp, d] of this rank's heads -> [b * s / tp, h, d] of its own tokens."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return x
    by_rank = x.unflatten(0, (batch, group.size(), -1)).transpose(0, 1)
    heads = all_to_all(group, by_rank.flatten(0, 2)).unflatten(0, (group.size(), -1))
    return heads.transpose(0, 1).flatten(1, 2)


def tokens_to_heads(x: Tensor, batch: int) -> Tensor:
    """Undoes `heads_to_tokens`: x [b * s / tp, h, d] -> [b * s, h / tp, d]."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return x
    by_rank = x.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return _sequences(all_to_all(group, by_rank.flatten(0, 1)), batch, group.size())


def _gather(x: Tensor, batch: int, group: Any, partial_grad: bool) -> Tensor:
    if group.size() == 1:
        return x
    shards = gather_from_sequence_parallel_region(
        x, tensor_parallel_output_grad=partial_grad, group=group
    )
    return _sequences(shards, batch, group.size())


def _sequences(shards: Tensor, batch: int, size: int) -> Tensor:
    """shards [size * b * s / size, ...], rank after rank -> whole sequences [b * s, ...]."""
    return shards.unflatten(0, (size, batch, -1)).transpose(0, 1).flatten(0, 2)


def sum_gradient_over_tp(*parameters: nn.Parameter) -> None:
    """Marks whole parameters of whose gradient every tensor-parallel rank makes a part.

    Megatron sums the marked gradients when it finishes a step.
    """
    for parameter in parameters:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
