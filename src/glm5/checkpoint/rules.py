"""Invertible rules between Hugging Face and Megatron-Core tensors, whole or tensor-parallel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from glm5.checkpoint.names import summarise
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.errors import CheckpointError


class Rule(ABC):
    """One Megatron tensor and the Hugging Face tensors that it is made of."""

    __slots__ = ()
    mcore: str

    @property
    def mcore_name(self) -> str:
        """The target."""
        return self.mcore

    @property
    @abstractmethod
    def hf_names(self) -> tuple[str, ...]:
        """The sources, in order."""

    @abstractmethod
    def fill(self, **placeholders: int) -> Self:
        """The rule with `{layer}`, `{expert}`, `{mtp}` in its names replaced."""

    @abstractmethod
    def to_mcore(self, tensors: Sequence[Tensor]) -> Tensor:
        """Make the Megatron tensor from the Hugging Face tensors."""

    @abstractmethod
    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        """Undo `to_mcore` exactly; the results are views where the rule allows it."""

    def load(
        self,
        reader: TensorReader,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        partition_dim: int | None = None,
    ) -> Tensor:
        """Read this rank's part of the Megatron tensor, and no other bytes.

        `partition_dim` 0 is column-parallel, 1 row-parallel, None replicated. Every source is cut
        by itself: a rank of a gated pair holds [gate_r; up_r].
        Raises CheckpointError where the ranks do not divide the dimension.
        """
        return self.to_mcore(
            [_read_part(reader, name, tp_rank, tp_size, partition_dim) for name in self.hf_names]
        )

    def join(self, shards: Sequence[Tensor], partition_dim: int | None = None) -> list[Tensor]:
        """Undo `load`: make the whole Hugging Face tensors from every rank's part, in order."""
        sources = zip(*(self.to_hf(shard) for shard in shards), strict=True)
        return [_join(parts, partition_dim) for parts in sources]


@dataclass(frozen=True, slots=True)
class Rename(Rule):
    """The same tensor under two names."""

    hf: str
    mcore: str

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,)

    def fill(self, **placeholders: int) -> Rename:
        return Rename(_fill(self.hf, placeholders), _fill(self.mcore, placeholders))

    def to_mcore(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True, slots=True)
class GatedPair(Rule):
    """`[gate; up]` stacked along dim 0."""

    hf_gate: str
    hf_up: str
    mcore: str

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf_gate, self.hf_up)

    def fill(self, **placeholders: int) -> GatedPair:
        names = (self.hf_gate, self.hf_up, self.mcore)
        return GatedPair(*(_fill(name, placeholders) for name in names))

    def to_mcore(self, tensors: Sequence[Tensor]) -> Tensor:
        gate, up = tensors
        if gate.shape != up.shape:
            raise CheckpointError(
                f"{self.hf_gate} and {self.hf_up} differ in shape",
                got=tuple(up.shape),
                expected=tuple(gate.shape),
                remedy="download these shards again",
            )
        return torch.cat([gate, up], dim=0)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        if tensor.shape[0] % 2:
            raise CheckpointError(
                f"{self.mcore} cannot be halved into gate and up",
                got=tuple(tensor.shape),
                expected="an even number of rows",
                remedy="give the whole [gate; up] weight",
            )
        return list(tensor.chunk(2, dim=0))


@dataclass(frozen=True, slots=True)
class HalfSwap(Rule):
    """The same tensor with the two halves of every head exchanged, along dim 0; its own inverse.

    For a side that rotates the last `rope_dim` of the `head_dim` dimensions of a head, where the
    other rotates the first. Raises CheckpointError unless the rope is half of the head.
    """

    hf: str
    mcore: str
    head_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self.rope_dim < 1 or self.head_dim != 2 * self.rope_dim:
            raise CheckpointError(
                f"the halves of the heads of {self.hf} cannot be exchanged",
                got=f"heads of {self.head_dim} dimensions, of which the rope has {self.rope_dim}",
                expected="a rope that is half of the head",
                remedy="use a Megatron-Core whose indexer rotates the first dimensions: >= 0.19",
            )

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,)

    def fill(self, **placeholders: int) -> HalfSwap:
        names = (_fill(self.hf, placeholders), _fill(self.mcore, placeholders))
        return HalfSwap(*names, self.head_dim, self.rope_dim)

    def to_mcore(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return self._swap(tensor)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [self._swap(tensor)]

    def _swap(self, tensor: Tensor) -> Tensor:
        """[heads * head_dim, ...], of whole heads."""
        if tensor.shape[0] % self.head_dim:
            raise CheckpointError(
                f"{self.mcore} does not consist of whole heads",
                got=f"{tensor.shape[0]} rows",
                expected=f"a multiple of {self.head_dim}",
                remedy="cut it between heads, or give the whole tensor",
            )
        return tensor.unflatten(0, (-1, 2, self.rope_dim)).flip(1).flatten(0, 2)


def check_total(rules: Iterable[Rule], hf_names: Iterable[str], mcore_names: Iterable[str]) -> None:
    """Check that the rules use every source once and make every target once.

    Raises CheckpointError that lists missing, unexpected and repeated names of each side.
    """
    rules = list(rules)
    problems = [
        *_mismatches("source", (name for rule in rules for name in rule.hf_names), hf_names),
        *_mismatches("target", (rule.mcore_name for rule in rules), mcore_names),
    ]
    if problems:
        raise CheckpointError(
            "the conversion rules do not cover the tensors exactly",
            got="; ".join(problems),
            expected="every source used once and every target made once",
            remedy="check that config.json, the checkpoint and the model belong together",
        )


def _mismatches(side: str, by_rules: Iterable[str], present: Iterable[str]) -> list[str]:
    used, there = Counter(by_rules), Counter(present)
    findings = {
        f"{side}s that are missing": used.keys() - there.keys(),
        f"{side}s that no rule covers": there.keys() - used.keys(),
        f"{side}s in two rules": {name for name, count in used.items() if count > 1},
        f"{side}s present twice": {name for name, count in there.items() if count > 1},
    }
    return [f"{what}: {summarise(names)}" for what, names in findings.items() if names]


def _fill(name: str, placeholders: dict[str, int]) -> str:
    # str.replace, not str.format: a template may be filled one placeholder at a time.
    for key, value in placeholders.items():
        name = name.replace("{" + key + "}", str(value))
    return name


def part_of(
    reader: TensorReader, name: str, tp_rank: int, tp_size: int, partition_dim: int | None
) -> tuple[int, int, int] | None:
    """Which part of a tensor a rank has: (dim, start, stop), None for all of it.

    Raises:
        CheckpointError: the ranks do not divide the dimension.
    """
    if partition_dim is None or tp_size == 1:
        return None
    shape = reader.shape(name)
    if partition_dim >= len(shape) or shape[partition_dim] % tp_size:
        raise CheckpointError(
            f"{name} in {reader.file_of(name)} cannot be cut along dim {partition_dim}",
            got=f"shape {shape}, {tp_size} tensor-parallel ranks",
            expected="a dimension that the ranks divide",
            remedy="choose a tensor-parallel size that divides this dimension",
        )
    size = shape[partition_dim] // tp_size
    return partition_dim, tp_rank * size, (tp_rank + 1) * size


def _read_part(
    reader: TensorReader, name: str, tp_rank: int, tp_size: int, partition_dim: int | None
) -> Tensor:
    part = part_of(reader, name, tp_rank, tp_size, partition_dim)
    return reader.read(name) if part is None else reader.read_slice(name, *part)


def _join(parts: Sequence[Tensor], partition_dim: int | None) -> Tensor:
    if partition_dim is None or len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim=partition_dim)
