"""Low-rank pairs, and the module that carries those of one Megatron linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from glm5.lora.dropout import LoraDropout
from glm5.lora.seeds import seed_of
from glm5.lora.spec import PairSpec
from glm5.model.parallel import sum_gradient_over_tp
from glm5.model.transformer_config import Glm5TransformerConfig

# How a linear is cut over the tensor-parallel ranks: by outputs, by inputs, or not at all.
Split = Literal["column", "row", "whole"]


class LoraPair(nn.Module):
    """Delta W = scale * B A for one linear (arXiv 2106.09685); B starts at zero, so the delta does.

    a [rank, in_features], b [out_features, rank], on the device of the base weight and in the
    model's dtype; of a split linear, b has this rank's outputs, or a its inputs.
    """

    def __init__(self, spec: PairSpec, base: nn.Module, in_features: int, out_features: int):
        super().__init__()
        self.scale = spec.scale
        self.a = new_factor(base, spec.rank, in_features)
        self.b = new_factor(base, out_features, spec.rank)

    def down(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> A x [..., rank], in the dtype of x."""
        return nn.functional.linear(x, self.a.to(x.dtype))

    def up(self, low: Tensor) -> Tensor:
        """low [..., rank] -> scale * B low [..., out_features], in the dtype of low."""
        return nn.functional.linear(low, self.b.to(low.dtype)) * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The pair of one Hugging Face linear: a [rank, in], b [out, rank], through which one can
    write; of a split linear, this rank's part."""

    a: Tensor
    b: Tensor
    scale: float


class Adapted(nn.Module):
    """A frozen base linear whose rows are `hf_linears`, with a pair for some of them."""

    def __init__(
        self,
        base: nn.Module,
        hf_linears: Sequence[str],
        pairs: Mapping[str, nn.Module],
        dropout: LoraDropout | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.hf_linears = tuple(hf_linears)
        self.split = split_of(base)
        self.pairs = nn.ModuleDict(pairs)
        self._dropout = dropout

    def pair_input(self, x: Tensor) -> Tensor:
        """What the pairs see in place of x: in training, x after dropout."""
        return self._dropout(x) if self._dropout is not None and self.training else x

    @property
    def ranks(self) -> ProcessGroup:
        """The ranks over which the base is cut."""
        return parallel_state.get_tensor_model_parallel_group()

    def factors(self, path: str) -> Iterator[tuple[str, str, Factors]]:
        """(path of the linear, Hugging Face linear, its pair); `path` is this module's."""
        for hf_linear in self.pairs:
            pair = self.pair(hf_linear)
            yield path, hf_linear, Factors(pair.a, pair.b, pair.scale)

    def pair(self, hf_linear: str) -> LoraPair:
        """The pair of one Hugging Face linear."""
        return cast(LoraPair, self.pairs[hf_linear])

    @torch.no_grad()
    def initialise(self, seed: int, path: str, global_name: Callable[[str], str]) -> None:
        """Draws every A from its global name and sets B to zero; `path` is this module's."""
        for hf_linear in self.pairs:
            pair = self.pair(hf_linear)
            draw_a(pair.a, seed, f"{global_name(path)}.{hf_linear}", *self._part())
            pair.b.zero_()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded tensors: a pair is cut as its base is."""
        # without the group every rank would say that it writes a whole weight
        state = sharded_state_dict_default(
            self.base, f"{prefix}base.", sharded_offsets, metadata, self.ranks
        )
        weight = f"{prefix}base.weight"
        # a frozen float8 base saves nothing
        if len(self.hf_linears) > 1 and weight in state:
            # [gate; up], each cut by itself: Megatron's MLP knows that of a linear of its own
            state[weight] = apply_swiglu_sharded_factory(state[weight], sharded_offsets)
        axes = {"column": {"b": 0}, "row": {"a": 1}, "whole": {}}[self.split]
        for hf_linear in self.pairs:
            state |= make_sharded_tensors_for_checkpoint(
                self.pair(hf_linear).state_dict(keep_vars=True),
                f"{prefix}pairs.{hf_linear}.",
                axes,
                sharded_offsets,
                tp_group=self.ranks,
                dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        return state

    def _part(self) -> tuple[int, int]:
        """Which of how many parts of A's inputs this rank has."""
        return (self.ranks.rank(), self.ranks.size()) if self.split == "row" else (0, 1)


def new_factor(base: nn.Module, *shape: int) -> nn.Parameter:
    """Zeros beside the weight of `base`, in the model's dtype: the weight's may be float8."""
    config = cast(Glm5TransformerConfig, base.config)
    device = cast(Tensor, base.weight).device
    return nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))


def linear_pair(spec: PairSpec, base: nn.Module, num_linears: int) -> LoraPair:
    """The pair of one of the `num_linears` linears that the rows of `base` are.

    Megatron is told which factor is cut, and of which every rank makes part of the gradient: a
    whole factor beside a cut one sees the other's outputs or tokens only in part.
    """
    weight, split = cast(Tensor, base.weight), split_of(base)
    pair = LoraPair(spec, base, weight.shape[1], weight.shape[0] // num_linears)
    if split == "column":
        set_tensor_model_parallel_attributes(pair.b, True, 0, 1)
        sum_gradient_over_tp(pair.a)
    elif split == "row":
        set_tensor_model_parallel_attributes(pair.a, True, 1, 1)
        sum_gradient_over_tp(pair.b)
    else:
        sum_gradient_over_tp(pair.a, pair.b)
    return pair


def draw_a(a: Tensor, seed: int, name: str, part: int = 0, parts: int = 1) -> None:
    """A uniform in +-1/sqrt(in_features), from (seed, name) alone: the same in every layout.

    a [rank, in_features / parts]; `part` of `parts` says which inputs this rank has.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    rank, in_features = a.shape[0], a.shape[1] * parts
    bound = 1 / math.sqrt(in_features)
    values = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
    a.copy_(values.chunk(parts, dim=1)[part])


def split_of(base: nn.Module) -> Split:
    """How `base` is cut, as its weight [.., out, in] says to Megatron."""
    weight = cast(Any, base.weight)
    if not getattr(weight, "tensor_model_parallel", False):
        return "whole"
    return "column" if weight.partition_dim == weight.ndim - 2 else "row"
