"""The collectives of the attention layer, each with the backward that its use needs."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from glm5.model.transformer_config import Glm5TransformerConfig
from glm5.ops.indexer_kl.inputs import SumOverRanks


def gather_tokens(x: Tensor, config: Glm5TransformerConfig, *, partial_grad: bool) -> Tensor:
    """x [s / tp, b, d] of sequence parallelism -> [s, b, d]; x itself without it.

    Backward: with `partial_grad` every tensor-parallel rank holds a part of the gradient (of its
    heads), and the parts are summed; else all ranks hold the same one and each takes its tokens.
    """
    if not config.sequence_parallel:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=partial_grad)


def gather_keys(x: Tensor, batch: int) -> Tensor:
    """x [b * s / cp, d], a context-parallel rank's keys -> [b * s, d], each document contiguous.

    Backward: a key's gradient is summed over the ranks whose queries used it.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return x
    group = parallel_state.get_context_parallel_group()
    shards = gather_from_sequence_parallel_region(x, group=group)
    by_document = shards.view(size, batch, -1, x.shape[-1]).transpose(0, 1)
    return by_document.reshape(-1, x.shape[-1])


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
