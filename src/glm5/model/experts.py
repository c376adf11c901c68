"""The routed experts of a layer: stacked weights, and one grouped linear for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.grouped import GroupedPair, grouped_linear, weighted_swiglu

# What expert-tensor-parallel ranks cut of a stacked weight [experts, outputs, inputs].
CUT_DIM = {"column": 1, "row": 2}

Offsets = tuple[tuple[int, int, int], ...]


class GroupedExperts(nn.Module):
    """y_i = p_i W_down (silu(W_gate x_i) * W_up x_i), each row by the expert it was sent to.

    In Megatron's calling convention for the experts of an MoE layer. The tokens of the rank's
    experts come one expert after another; what ranks exchange is the dispatcher's business.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Glm5TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        del name
        super().__init__()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = GroupedLinear(
            (num_local_experts, 2 * width, hidden),
            "column",
            parts=2,
            config=config,
            groups=pg_collection,
        )
        self.linear_fc2 = GroupedLinear(
            (num_local_experts, hidden, width), "row", config=config, groups=pg_collection
        )

    def forward(
        self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """x [t, hidden_size] sorted by expert; tokens_per_expert [local experts] integer, on any
        device; probs [t], the routers' weights -> (y [t, hidden_size], no bias).

        Under expert tensor parallelism y is this rank's part of a sum. The host waits for nothing.
        """
        ends = _group_ends(tokens_per_expert, x.device)
        return self.linear_fc2(weighted_swiglu(self.linear_fc1(x, ends), probs), ends), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded tensors, under the keys of Megatron's own experts modules."""
        state: dict[str, Any] = {}
        for name, module in self.named_children():
            sharded = cast(Any, module).sharded_state_dict
            state |= sharded(f"{prefix}{name}.", sharded_offsets, metadata)
        replace_prefix_for_sharding(state, prefix, f"{prefix}experts.")
        return state


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
        self.weight = nn.Parameter(
            torch.empty(sizes, dtype=config.params_dtype, device=build_device(config))
        )
        mark_expert(self.weight, cut, config, stride=parts)

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
        return {key: self._by_expert_and_part(key, sharded_offsets)}

    def _by_expert_and_part(self, key: str, offsets: Offsets) -> ShardedTensorFactory:
        """A shard for each part of each expert: those lie in one piece, stacked ones would not."""
        groups, parts = self.groups, self.parts
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

        return ShardedTensorFactory(key, self.weight, build, merge, (0, 0, groups.expt_dp.rank()))


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


def _group_ends(tokens_per_expert: Tensor, device: torch.device) -> Tensor:
    """Where each expert's rows end, [local experts] int32 on `device`, without waiting for it."""
    ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
    if ends.device.type == device.type:
        return ends
    return ends.pin_memory().to(device, non_blocking=True)
