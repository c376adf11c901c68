"""Where the factors of every linear lie in an adapter file; read when they are asked for."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from glm5.checkpoint.adapter import FactorSpec, LazyFactors, LoraFactors
from glm5.checkpoint.adapter_file import AdapterFile
from glm5.checkpoint.adapter_fused import adapted_linears, is_block_diagonal, split_experts
from glm5.checkpoint.adapter_layout import FusedWeight


class Side(NamedTuple):
    """One factor: a whole tensor of the file, or one row of a 3-D tensor."""

    name: str
    row: int | None = None
    shared: bool = False
    """Whether the experts of a layer share it: then they get one tensor object."""


class _Pair(NamedTuple):
    a: Side
    b: Side
    scale: float


class _Fused(NamedTuple):
    a: str
    b: str
    weight: FusedWeight
    scale: float
    split_rank: bool


class AdapterPlaces:
    """Collects where each linear's pair lies. Pairs that are all zero, which a loader wants as
    filler and which could never learn, can be left out; one row mostly tells.
    """

    def __init__(self, file: AdapterFile, num_experts: int) -> None:
        self._file = file
        self._num_experts = num_experts
        self._specs: dict[str, FactorSpec] = {}
        self._places: dict[str, _Pair | _Fused] = {}
        # gate, up and down of the layer in use
        self._shared_side = lru_cache(maxsize=3)(self._read_side)
        self._fused_pairs = lru_cache(maxsize=2)(self._read_fused)

    def add_pair(self, path: str, a: Side, b: Side, scale: float, *, drop_zero: bool) -> None:
        """Two factors that lie apart."""
        if drop_zero and self._is_zero(a) and self._is_zero(b):
            return
        rank = self._file.shape(a.name)[-2]
        self._specs[path] = FactorSpec(rank, scale, self._file.dtype(a.name))
        self._places[path] = _Pair(a, b, scale)

    def add_fused(
        self, weight: FusedWeight, a: str, b: str, scale: float, *, own_ranks: bool
    ) -> None:
        """The experts of a layer, fused as PEFT keeps them; those that are all zero are left out.

        `own_ranks` says what a b that is all zero does not: that gate and up have ranks apart.
        """
        fused = LoraFactors(self._file.read(a), self._file.read(b), scale)
        experts = self._num_experts
        split_rank = is_block_diagonal(weight, fused, num_experts=experts) and (
            own_ranks or bool(fused.b.any())
        )
        place = _Fused(a, b, weight, scale, split_rank)
        rank = fused.a.shape[0] // experts // (len(weight.projections) if split_rank else 1)
        spec = FactorSpec(rank, scale, fused.a.dtype)
        adapted = adapted_linears(weight, fused, num_experts=experts, split_rank=split_rank)
        for path in adapted.values():
            self._specs[path], self._places[path] = spec, place

    def factors(self, order: Mapping[str, object]) -> LazyFactors:
        """What was collected, in the order of the model's linears."""
        specs = {path: self._specs[path] for path in order if path in self._specs}
        return LazyFactors(specs, self._load)

    def _load(self, path: str) -> LoraFactors:
        place = self._places[path]
        if isinstance(place, _Fused):
            return self._fused_pairs(place)[path]
        return LoraFactors(self._side(place.a), self._side(place.b), place.scale)

    def _side(self, side: Side) -> Tensor:
        return self._shared_side(side) if side.shared else self._read_side(side)

    def _read_side(self, side: Side) -> Tensor:
        if side.row is None:
            return self._file.read(side.name)
        return self._file.read_row(side.name, side.row)

    def _is_zero(self, side: Side) -> bool:
        if side.row is None and self._file.read_row(side.name, 0).any():
            return False
        return not self._side(side).any()

    def _read_fused(self, place: _Fused) -> dict[str, LoraFactors]:
        fused = LoraFactors(self._file.read(place.a), self._file.read(place.b), place.scale)
        return split_experts(
            place.weight, fused, num_experts=self._num_experts, split_rank=place.split_rank
        )
