"""An adapter in memory: low-rank factors of linears, and whole trained tensors beside them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5.lora.spec import ExpertLora


@dataclass(frozen=True, slots=True, eq=False)
class LoraFactors:
    """One linear's adapter: delta W = scale * b @ a, a [rank, in], b [out, rank].

    scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732).
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def spec(self) -> "FactorSpec":
        """What is known of the pair without its values."""
        return FactorSpec(self.a.shape[0], self.scale, self.a.dtype)


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """What is known of a pair without its values."""

    rank: int
    scale: float
    dtype: torch.dtype


class Lazy[T](Mapping[str, T]):
    """Named values that are made each time they are asked for."""

    def __init__(self, names: Mapping[str, object], load: Callable[[str], T]) -> None:
        self._names = names
        self._load = load

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} names)"


class LazyFactors(Lazy[LoraFactors]):
    """Factors that are made when they are asked for; what `specs` says of them is known before."""

    def __init__(self, specs: Mapping[str, FactorSpec], load: Callable[[str], LoraFactors]) -> None:
        super().__init__(specs, load)
        self.specs = specs


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """All that an adapter changes in a model.

    factors: by Hugging Face path of the linear, one per routed expert. May be lazy, so that an
    adapter larger than memory streams from one file to another.
    expert_lora: "shared_outer" says that the experts of a layer have one a in gate_proj and
    up_proj, and one b in down_proj: one tensor object, or equal ones. "none": no expert is adapted.
    modules: whole trained tensors by Hugging Face name (router, norms, embeddings, head).
    """

    factors: Mapping[str, LoraFactors]
    expert_lora: ExpertLora
    modules: Mapping[str, Tensor] = field(default_factory=dict)


def factor_specs(factors: Mapping[str, LoraFactors]) -> Mapping[str, FactorSpec]:
    """What is known of every pair, without reading values that are not in memory."""
    if isinstance(factors, LazyFactors):
        return factors.specs
    return {path: pair.spec for path, pair in factors.items()}


def without_linears(adapter: LoraAdapter, names: Collection[str]) -> LoraAdapter:
    """The adapter short of the linears whose last name is in `names`: another model, on purpose."""
    specs = {
        path: spec
        for path, spec in factor_specs(adapter.factors).items()
        if path.rpartition(".")[2] not in names
    }
    has_experts = any(is_expert(path) for path in specs)
    return LoraAdapter(
        LazyFactors(specs, adapter.factors.__getitem__),
        adapter.expert_lora if has_experts else "none",
        adapter.modules,
    )


def is_expert(path: str) -> bool:
    """Whether the linear at `path` belongs to a routed expert."""
    return ".mlp.experts." in path


def padded(pair: LoraFactors, rank: int) -> LoraFactors:
    """The same delta, exactly, at a larger rank: a [rank, in], b [out, rank] end in zeros."""
    missing = rank - pair.a.shape[0]
    assert missing >= 0, f"rank {pair.a.shape[0]} does not fit into {rank}"
    if not missing:
        return pair
    return LoraFactors(pad(pair.a, (0, 0, 0, missing)), pad(pair.b, (0, missing)), pair.scale)


def rescaled(pair: LoraFactors, scale: float) -> LoraFactors:
    """The same delta under another scale: b takes up the ratio, rounded once to its dtype.

    Exact where `scales_exactly` says so, barring values that leave the dtype's range.
    """
    if pair.scale == scale:
        return pair
    b = (pair.b.double() * (pair.scale / scale)).to(pair.b.dtype)
    return LoraFactors(pair.a, b, scale)


def scales_exactly(old: float, new: float) -> bool:
    """Whether the ratio of two scales is a power of two, so that it rounds nothing."""
    return math.frexp(old / new)[0] == 0.5
