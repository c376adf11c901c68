"""One linear of all routed experts of a layer: stacked weights, and how ranks share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.grouped import GroupedPair, grouped_linear

# What expert-tensor-parallel ranks cut of a stacked weight [experts, outputs, inputs].
CUT_DIM = {"column": 1, "row": 2}

Offsets = tuple[tuple[int, int, int], ...]


class GroupedLinear(nn.Module):
    """One linear of every local expert: y_i = W_e x_i for each row i of expert e.

    weight [local experts, outputs, inputs], cut over the expert-tensor-parallel ranks by outputs
    ("column") or inputs ("row"). The outputs are `parts` linears of the checkpoint, each of which
    is cut by itself: a rank has its rows of gate above its rows of up.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        split: Literal["column", "row"],
        *,
        parts: int = 1,
        config: Glm5TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.config = config
        self.split = split
        self.parts = parts
        self.groups = groups
        sizes, cut = list(shape), CUT_DIM[split]
        assert sizes[cut] % (parts * groups.expt_tp.size()) == 0, f"{shape} over {groups.expt_tp}"
        sizes[cut] //= groups.expt_tp.size()
        self.make_weight((sizes[0], sizes[1], sizes[2]))
        mark_expert(self.weight, cut, config, stride=parts)

    def make_weight(self, sizes: tuple[int, int, int]) -> None:
        """Makes the parameter of this rank, without values."""
        dtype, device = self.config.params_dtype, build_device(self.config)
        self.weight = nn.Parameter(torch.empty(sizes, dtype=dtype, device=device))

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        pairs: Sequence[GroupedPair | None] = (),
        pair_input: Tensor | None = None,
    ) -> Tensor:
        """x [t, inputs], ends [local experts] int32 -> [t, outputs]; see grouped_linear."""
        return grouped_linear(x, self.weight, ends, pairs, pair_input)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded tensor of the weight."""
        del metadata
        key, cut = f"{prefix}weight", CUT_DIM[self.split]
        if self.parts == 1:
            return {key: shard_of_experts(key, self.weight, self.groups, sharded_offsets, cut)}
        return {
            key: shard_of_parts(key, self.weight, self.groups, sharded_offsets, parts=self.parts)
        }


def shard_of_parts(
    key: str, tensor: Tensor, groups: ProcessGroupCollection, offsets: Offsets, *, parts: int
) -> ShardedTensorFactory:
    """A stacked tensor [local experts, outputs, inputs], each part of whose outputs is cut by
    itself: a shard for each part of each expert, since those lie in one piece."""
    tp_rank, tp_size = groups.expt_tp.rank(), groups.expt_tp.size()

    def build(key: str, tensor: Tensor, replica_id: Any, flat: slice | None) -> list[Any]:
        assert flat is None
        first, total = groups.ep.rank() * len(tensor), groups.ep.size() * len(tensor)
        axis = len(offsets)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                shard,
                *offsets,
                (axis, first + expert, total),
                (axis + 1, part * tp_size + tp_rank, parts * tp_size),
                replica_id=replica_id,
                prepend_axis_num=axis + 1,
            )
            for expert, weight in enumerate(tensor.detach())
            for part, shard in enumerate(weight.chunk(parts))
        ]

    def merge(shards: list[Tensor]) -> Tensor:
        return torch.cat(shards).view(-1, parts * shards[0].shape[0], shards[0].shape[1])

    return ShardedTensorFactory(key, tensor, build, merge, (0, 0, groups.expt_dp.rank()))


def mark_expert(
    parameter: nn.Parameter, cut: int | None, config: Glm5TransformerConfig, stride: int = 1
) -> None:
    """Tells Megatron over which ranks a routed expert's parameter is cut and reduced.

    `cut` is the dimension that expert-tensor-parallel ranks share, None where each has all of it.
    """
    if cut is not None:
        set_tensor_model_parallel_attributes(parameter, True, cut, stride)
    # where experts have the ranks of everything else, Megatron reduces them together
    own_ranks = (
        config.expert_model_parallel_size > 1
        or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    parameter.allreduce = not own_ranks  # type: ignore[attr-defined]


def shard_of_experts(
    key: str, tensor: Tensor, groups: ProcessGroupCollection, offsets: Offsets, cut: int | None
) -> ShardedTensor:
    """A stacked tensor [local experts, ...] as this rank's shard of all experts' tensor.

    `cut` as in `mark_expert`; `offsets` are those of axes in front, as Megatron hands them down.
    """
    axis = len(offsets)
    own = [(axis, groups.ep.rank(), groups.ep.size())]
    if cut is not None:
        own.append((axis + cut, groups.expt_tp.rank(), groups.expt_tp.size()))
    replica = 0 if cut is not None else groups.expt_tp.rank()
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *offsets,
        *own,
        replica_id=(0, replica, groups.expt_dp.rank()),
        prepend_axis_num=axis,
    )
