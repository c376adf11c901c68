"""Megatron-Bridge's adapters on the linears that are ours, computed as glm5.lora computes them."""

from __future__ import annotations

from typing import Any

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.core import parallel_state
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from glm5.lora.attach import adapted_type
from glm5.lora.dropout import LoraDropout
from glm5.lora.experts import GroupedLoraPair, cut_dim, shared_shard
from glm5.lora.factors import LoraPair, Split, split_of
from glm5.model.experts import GroupedLinear, shard_of_experts, shard_of_parts
from glm5.model.parallel import sum_gradient_over_tp

# glm5.lora keeps pairs by linear; Megatron-Bridge has one for all rows of a module.
_ALL_ROWS = "all"
_SHARDED_DIMS: dict[Split, dict[str, int]] = {
    "column": {"linear_out.weight": 0},
    "row": {"linear_in.weight": 1},
    "whole": {},
}


class BridgedPair(nn.Module):
    """A pair under the names, and with the attributes, that Megatron-Bridge's exports look for.

    linear_in.weight is A [rank, in_features], linear_out.weight B [out_features, rank]; of stacked
    experts both have the experts in front, but for a factor that all of them share.
    """

    def __init__(self, pair: LoraPair | GroupedLoraPair, split: Split, *, dim: int, alpha: float):
        super().__init__()
        self.linear_in, self.linear_out = _Factor(pair.a, pair), _Factor(pair.b, pair)
        self.scale = pair.scale
        self.dim, self.alpha = dim, alpha
        self.input_is_parallel = split == "row"
        self.base_linear_is_parallel = split != "whole"
        self.stacked = isinstance(pair, GroupedLoraPair)

    @property
    def a(self) -> Tensor:
        """As glm5.lora has it: a shared factor of experts counts as one of one expert."""
        return self._as_stack(self.linear_in.weight)

    @property
    def b(self) -> Tensor:
        """The same for B."""
        return self._as_stack(self.linear_out.weight)

    def down(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> A x [..., rank], in the dtype of x."""
        return nn.functional.linear(x, self.a.to(x.dtype))

    def up(self, low: Tensor) -> Tensor:
        """low [..., rank] -> scale * B low [..., out_features], in the dtype of low."""
        return nn.functional.linear(low, self.b.to(low.dtype)) * self.scale

    def _as_stack(self, factor: Tensor) -> Tensor:
        return factor[None] if self.stacked and factor.dim() == 2 else factor


class BridgedLora(AdapterWrapper):
    """A linear of ours with an adapter of Megatron-Bridge's, which can be switched off."""

    def __init__(
        self, base: nn.Module, adapter: BridgedPair, dropout: LoraDropout | None = None
    ) -> None:
        super().__init__(base, adapter)
        # in a tuple: its parts are this module's children already
        self._adapted = (adapted_type(base)(base, (_ALL_ROWS,), {_ALL_ROWS: adapter}, dropout),)

    def forward(self, *inputs: Any) -> Any:
        """As the base's."""
        return self._active()(*inputs)

    def absorb_query(self, q: Tensor) -> Tensor:
        """As LatentUpProjection's."""
        return self._active().absorb_query(q)

    def expand_output(self, out_latent: Tensor) -> Tensor:
        """As LatentUpProjection's."""
        return self._active().expand_output(out_latent)

    def expand_latent(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        """As LatentUpProjection's."""
        return self._active().expand_latent(kv_latent)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded tensors: the base under its own names, the factors cut as it is."""
        base, stem = self.to_wrap, f"{prefix}adapter."
        tp_group = parallel_state.get_tensor_model_parallel_group()
        # without the group every rank would say that it writes a whole weight
        state = sharded_state_dict_default(base, prefix, sharded_offsets, metadata, tp_group)
        if isinstance(base, GroupedLinear):
            return state | _sharded_experts(base, self.adapter, stem, sharded_offsets)
        return state | make_sharded_tensors_for_checkpoint(
            self.adapter.state_dict(keep_vars=True),
            stem,
            _SHARDED_DIMS[split_of(base)],
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )

    def _active(self) -> Any:
        (adapted,) = self._adapted
        # not a child, so that .train() and .eval() do not reach it
        adapted.training = self.training
        return adapted if self._adapter_enabled else self.to_wrap


class _Factor(nn.Module):
    def __init__(self, factor: Tensor, pair: LoraPair | GroupedLoraPair) -> None:
        super().__init__()
        assert isinstance(factor, nn.Parameter)
        if isinstance(pair, GroupedLoraPair) and pair.shares["a" if factor is pair.a else "b"]:
            factor = nn.Parameter(factor.detach()[0])
            sum_gradient_over_tp(factor)
        self.weight = factor


def _sharded_experts(
    base: GroupedLinear, adapter: BridgedPair, stem: str, offsets: tuple[Any, ...]
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, factor in adapter.named_parameters():
        key = f"{stem}{name}"
        which = "a" if name.startswith("linear_in") else "b"
        if factor.dim() == 2:
            state |= shared_shard(stem, name, factor, offsets)
        elif which == "b" and base.parts > 1:
            state[key] = shard_of_parts(key, factor, base.groups, offsets, parts=base.parts)
        else:
            cut = cut_dim(base, which)
            state[key] = shard_of_experts(key, factor, base.groups, offsets, cut)
    return state
