"""Low-rank pairs, and the module that carries those of one Megatron linear."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from glm5.model.parallel import sum_gradient_over_tp

# How a linear is cut over the tensor-parallel ranks: by outputs, by inputs, or not at all.
Split = Literal["column", "row", "whole"]


class LoraPair(nn.Module):
    """Delta W = scale * B A for one linear (arXiv 2106.09685); B starts at zero, so the delta does.

    a [rank, in_features], b [out_features, rank], in the dtype and on the device of the base
    weight; of a split linear, b has this rank's outputs, or a its inputs.
    """

    def __init__(
        self, rank: int, in_features: int, out_features: int, scale: float, like: Tensor
    ) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(like.new_empty(rank, in_features))
        self.b = nn.Parameter(like.new_zeros(out_features, rank))
        for parameter in (self.a, self.b):
            # Megatron reduces gradients of experts and of the rest over different groups
            _copy_attribute(like, parameter, "allreduce")

    def initialise(self, seed: int, name: str, part: int = 0, parts: int = 1) -> None:
        """A uniform in +-1/sqrt(in_features), from (seed, name) alone: the same in every layout.

        `part` of `parts` says which inputs this rank has.
        """
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        rank, in_features = self.a.shape[0], self.a.shape[1] * parts
        bound = 1 / math.sqrt(in_features)
        values = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            self.a.copy_(values.chunk(parts, dim=1)[part])
            self.b.zero_()

    def down(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> A x [..., rank], in the dtype of x."""
        return nn.functional.linear(x, self.a.to(x.dtype))

    def up(self, low: Tensor) -> Tensor:
        """low [..., rank] -> scale * B low [..., out_features], in the dtype of low."""
        return nn.functional.linear(low, self.b.to(low.dtype)) * self.scale


class Adapted(nn.Module):
    """A frozen base linear whose rows are `hf_linears`, with a pair for each of `wanted`."""

    def __init__(
        self,
        base: nn.Module,
        hf_linears: Sequence[str],
        wanted: Sequence[str],
        *,
        rank: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.base = base
        self.hf_linears = tuple(hf_linears)
        self.split = split_of(base)
        weight = cast(Tensor, base.weight)
        rows, in_features = weight.shape[0] // len(self.hf_linears), weight.shape[1]
        self.pairs = nn.ModuleDict(
            {name: LoraPair(rank, in_features, rows, scale, weight) for name in wanted}
        )
        for name in wanted:
            self._mark(self.pair(name))

    def pair(self, hf_linear: str) -> LoraPair:
        """The pair of one Hugging Face linear."""
        return cast(LoraPair, self.pairs[hf_linear])

    @property
    def ranks(self) -> ProcessGroup:
        """The ranks over which the base is cut; experts have other ones than the rest."""
        if is_expert(self.base):
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def whole_factors(self) -> list[nn.Parameter]:
        """The factors that are whole beside a cut one: each rank makes a part of their gradient."""
        if self.split == "whole":
            return []
        pairs = [self.pair(hf_linear) for hf_linear in self.pairs]
        return [pair.a if self.split == "column" else pair.b for pair in pairs]

    def initialise(self, seed: int, path: str) -> None:
        """Draws every pair; `path` is the module's global name."""
        part, parts = (self.ranks.rank(), self.ranks.size()) if self.split == "row" else (0, 1)
        for hf_linear in self.pairs:
            self.pair(hf_linear).initialise(seed, f"{path}.{hf_linear}", part, parts)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded tensors: a pair is cut as its base is."""
        state = sharded_state_dict_default(self.base, f"{prefix}base.", sharded_offsets, metadata)
        axes = {"column": {"b": 0}, "row": {"a": 1}, "whole": {}}[self.split]
        for hf_linear in self.pairs:
            pair = self.pair(hf_linear)
            state |= make_sharded_tensors_for_checkpoint(
                pair.state_dict(keep_vars=True),
                f"{prefix}pairs.{hf_linear}.",
                axes,
                sharded_offsets,
                tp_group=self.ranks,
                dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        return state

    def _mark(self, pair: LoraPair) -> None:
        """Tells Megatron which factor is cut, and of which every rank makes part of the gradient.

        A whole factor beside a cut one sees the other's outputs or tokens only in part; those of
        experts are left to `sum_expert_gradients`, since Megatron's mark means all other ranks.
        """
        if self.split == "column":
            set_tensor_model_parallel_attributes(pair.b, True, 0, 1)
        elif self.split == "row":
            set_tensor_model_parallel_attributes(pair.a, True, 1, 1)
        if is_expert(self.base):
            return
        if self.split == "whole":
            sum_gradient_over_tp(pair.a, pair.b)
        else:
            sum_gradient_over_tp(pair.a if self.split == "column" else pair.b)


def split_of(base: nn.Module) -> Split:
    """How `base` is cut."""
    if isinstance(base, ColumnParallelLinear):
        return "column"
    return "row" if isinstance(base, RowParallelLinear) else "whole"


def is_expert(base: nn.Module) -> bool:
    """Whether `base` belongs to a routed expert."""
    return bool(getattr(base, "is_expert", False))


def _copy_attribute(source: Any, target: Any, name: str) -> None:
    if hasattr(source, name):
        setattr(target, name, getattr(source, name))
