"""The collectives of the attention layer, each with the backward that its use needs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from glm5.ops.indexer_kl.inputs import SumOverRanks


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


def gather_context(x: Tensor) -> Tensor:
    """x [b, s / cp], a constant of this rank's tokens -> [b, s] of whole rows."""
    group = parallel_state.get_context_parallel_group()
    return _gather(x.flatten(), len(x), group, partial_grad=True).view(len(x), -1)


def own_context(x: Tensor) -> Tensor:
    """Undoes `gather_context`: x [b, s] -> [b, s / cp], the tokens of this rank."""
    group = parallel_state.get_context_parallel_group()
    return x.chunk(group.size(), dim=1)[group.rank()]


def of_this_rank(x: Tensor) -> Tensor:
    """x [t, ...] -> [t / tp, ...], the rows of this rank's queries: see `QueryShares`."""
    group = parallel_state.get_tensor_model_parallel_group()
    return x[group.rank() :: group.size()]


def query_rows(num_queries: int, *, shared: bool) -> range:
    """Where in a packed row the queries stand that this rank selects keys for.

    num_queries: of the context-parallel rank's part of the row; `shared`: see `QueryShares`.
    """
    first = parallel_state.get_context_parallel_rank() * num_queries
    if not shared:
        return range(first, first + num_queries)
    group = parallel_state.get_tensor_model_parallel_group()
    return range(first + group.rank(), first + num_queries, group.size())


def token_rows(num_tokens: int, *, shared: bool) -> range:
    """Where in a packed row this rank's num_tokens stand outside attention.

    `shared`: tensor-parallel ranks have a part each, as under sequence parallelism.
    """
    part = parallel_state.get_context_parallel_rank()
    if shared:
        group = parallel_state.get_tensor_model_parallel_group()
        part = part * group.size() + group.rank()
    return range(part * num_tokens, (part + 1) * num_tokens)


def _gather(x: Tensor, batch: int, group: Any, partial_grad: bool) -> Tensor:
    if group.size() == 1:
        return x
    shards = gather_from_sequence_parallel_region(
        x, tensor_parallel_output_grad=partial_grad, group=group
    )
    return shards.unflatten(0, (group.size(), batch, -1)).transpose(0, 1).flatten(0, 2)


def sum_gradient_over_tp(*parameters: nn.Parameter) -> None:
    """Marks whole parameters of whose gradient every tensor-parallel rank makes a part.

    Megatron sums the marked gradients when it finishes a step.
    """
    for parameter in parameters:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]


def tp_sum() -> SumOverRanks | None:
    """A function that adds up a constant in place over the tensor-parallel ranks; None for one."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    return lambda part: torch.distributed.all_reduce(part, group=group)
