"""LoRA on the routed experts of a layer: stacked factors beside stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from glm5.lora.factors import Adapted, Factors, draw_a, new_factor
from glm5.lora.spec import PairSpec
from glm5.model.experts import CUT_DIM, GroupedLinear, mark_expert, shard_of_experts
from glm5.model.names import expert_name
from glm5.model.parallel import sum_gradient_over_tp
from glm5.ops.grouped import GroupedPair


class GroupedLoraPair(nn.Module):
    """Delta W_e = scale * B_e A_e for the local experts e of a layer.

    a [experts or 1, rank, in_features], b [experts or 1, out_features, rank]: 1 where all experts
    of the layer, on all ranks, share the factor.
    """

    def __init__(
        self,
        spec: PairSpec,
        base: GroupedLinear,
        rows: int,
        *,
        shares_a: bool = False,
        shares_b: bool = False,
    ) -> None:
        super().__init__()
        self.scale = spec.scale
        experts, _, in_features = base.weight.shape
        self.a = new_factor(base, 1 if shares_a else experts, spec.rank, in_features)
        self.b = new_factor(base, 1 if shares_b else experts, rows, spec.rank)
        self.shares = {"a": shares_a, "b": shares_b}


class GroupedLora(Adapted):
    """`GroupedLinear` with pairs for each of its Hugging Face linears.

    A shared factor is whole on every rank, and each rank makes a part of its gradient from the
    tokens of its own experts. Together tp, cp and dp are as many ranks as ep, etp and the copies of
    the experts: Megatron sums over all of them, as for any parameter outside the experts.
    """

    base: GroupedLinear

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [t, inputs], ends [local experts] int32 -> [t, outputs]; see GroupedLinear."""
        pairs = [self._grouped_pair(name) for name in self.hf_linears]
        seen = self.pair_input(x)
        return self.base(x, ends, pairs, None if seen is x else seen)

    def _grouped_pair(self, name: str) -> GroupedPair | None:
        if name not in self.pairs:
            return None
        pair = self.grouped_pair(name)
        return GroupedPair(pair.a, pair.b, pair.scale)

    def grouped_pair(self, hf_linear: str) -> GroupedLoraPair:
        """The stacked pair of one Hugging Face linear."""
        return cast(GroupedLoraPair, self.pairs[hf_linear])

    @property
    def shares_factors(self) -> bool:
        """Whether all experts of the layer share a factor of each pair."""
        return any(any(self.grouped_pair(name).shares.values()) for name in self.pairs)

    @property
    def ranks(self) -> ProcessGroup:
        """The ranks over which every expert is cut."""
        return parallel_state.get_expert_tensor_parallel_group()

    def factors(self, path: str) -> Iterator[tuple[str, str, Factors]]:
        """Those of every local expert; a shared factor is the same memory in all of them."""
        for hf_linear in self.pairs:
            pair = self.grouped_pair(hf_linear)
            count = len(self.base.weight)
            a, b = (factor.detach().expand(count, -1, -1) for factor in (pair.a, pair.b))
            for expert in range(count):
                name = expert_name(path, expert)
                yield name, hf_linear, Factors(a[expert], b[expert], pair.scale)

    def partial_factors(self) -> list[nn.Parameter]:
        """Each expert's own factors that are whole beside a cut one.

        Every expert-tensor-parallel rank makes a part of their gradient.
        """
        name = "a" if self.split == "column" else "b"
        pairs = [self.grouped_pair(hf_linear) for hf_linear in self.pairs]
        return [cast(nn.Parameter, getattr(pair, name)) for pair in pairs if not pair.shares[name]]

    @torch.no_grad()
    def initialise(self, seed: int, path: str, global_name: Callable[[str], str]) -> None:
        """As of one linear: every expert's A by its own name, a shared one by the layer's."""
        for hf_linear in self.pairs:
            pair = self.grouped_pair(hf_linear)
            for expert, a in enumerate(pair.a):
                name = path if pair.shares["a"] else expert_name(path, expert)
                draw_a(a, seed, f"{global_name(name)}.{hf_linear}", *self._part())
            pair.b.zero_()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded tensors: own factors as the weights are, shared ones once."""
        state = self.base.sharded_state_dict(f"{prefix}base.", sharded_offsets, metadata)
        for hf_linear in self.pairs:
            pair = self.grouped_pair(hf_linear)
            stem = f"{prefix}pairs.{hf_linear}."
            for name, factor in pair.named_parameters():
                if pair.shares[name]:
                    state |= shared_shard(stem, name, factor, sharded_offsets)
                    continue
                key = f"{stem}{name}"
                state[key] = shard_of_experts(
                    key, factor, self.base.groups, sharded_offsets, cut_dim(self.base, name)
                )
        return state


def expert_pair(
    spec: PairSpec, base: GroupedLinear, num_linears: int, *, shares_outer: bool
) -> GroupedLoraPair:
    """The pair of one of the `num_linears` linears that the rows of every expert are.

    Megatron is told over which ranks each factor is cut and reduced.
    """
    pair = GroupedLoraPair(
        spec,
        base,
        base.weight.shape[1] // num_linears,
        shares_a=shares_outer and base.split == "column",
        shares_b=shares_outer and base.split == "row",
    )
    for name, factor in pair.named_parameters():
        if pair.shares[name]:
            sum_gradient_over_tp(factor)
        else:
            mark_expert(factor, cut_dim(base, name), base.config)
    return pair


def cut_dim(base: GroupedLinear, factor: str) -> int | None:
    """The dimension of a stacked factor that expert-tensor-parallel ranks share, if any."""
    cut = "b" if base.split == "column" else "a"
    return CUT_DIM[base.split] if factor == cut else None


def shared_shard(stem: str, name: str, factor: Tensor, offsets: tuple[Any, ...]) -> dict[str, Any]:
    """Of a factor that every rank holds."""
    return make_sharded_tensors_for_checkpoint(
        {name: factor},
        stem,
        {},
        offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
