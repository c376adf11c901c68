"""The routed experts of a layer: two grouped linears and what stands between them."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from glm5.model.experts import Offsets
from glm5.model.linears import linears_of
from glm5.model.transformer_config import Glm5TransformerConfig
from glm5.ops.grouped import weighted_swiglu


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
        linear = linears_of(config).grouped
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = linear(
            (num_local_experts, 2 * width, hidden),
            "column",
            parts=2,
            config=config,
            groups=pg_collection,
        )
        self.linear_fc2 = linear(
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


def _group_ends(tokens_per_expert: Tensor, device: torch.device) -> Tensor:
    """Where each expert's rows end, [local experts] int32 on `device`, without waiting for it."""
    ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
    if ends.device.type == device.type:
        return ends
    return ends.pin_memory().to(device, non_blocking=True)
