"""How the kernels read the factors of several pairs: by slots of a common, padded rank."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor


class Factors(NamedTuple):
    """One side of the pairs: slot p * padded_rank + r is rank r of the p-th pair.

    tensors [n or 1, rank, in] (a) or [n or 1, out, rank] (b), contiguous, as many groups in all;
    parts: the part of the out_features of each.
    """

    tensors: tuple[Tensor, ...]
    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    scales: tuple[float, ...]
    padded_rank: int

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], ranks: Sequence[int], parts: Sequence[int],
        scales: Sequence[float],
    ) -> Self:  # fmt: skip
        padded = padded_size(max(ranks, default=1))
        contiguous = tuple(x.contiguous() for x in tensors)
        return cls(contiguous, tuple(ranks), tuple(parts), tuple(scales), padded)

    @property
    def is_shared(self) -> bool:
        """Whether all groups share the factors."""
        return len(self.tensors[0]) == 1

    @property
    def num_slots(self) -> int:
        """Columns of a tensor with one for each slot."""
        return len(self.tensors) * self.padded_rank

    def kernel_arguments(self) -> dict[str, Any]:
        """Tensors, ranks, elements between groups, parts, and the padded rank."""
        return {
            "factors": self.tensors,
            "ranks": self.ranks,
            "group_strides": tuple(0 if len(x) == 1 else x[0].numel() for x in self.tensors),
            "parts": self.parts,
            "RANK": self.padded_rank,
        }


def padded_size(size: int) -> int:
    """The smallest power of two that tl.dot takes and that holds so many."""
    return max(16, triton.next_power_of_2(size))


def is_interpreted(x: Tensor) -> bool:
    """Whether the kernels run in Triton's interpreter, whose bf16 products are wrong."""
    return not x.is_cuda


@triton.jit
def slot_rows(factors, ranks, group_strides, group, slots, in_features, RANK: tl.constexpr):
    """Factors a: where the row of each slot begins, and whether the slot has one."""
    rank = slots % RANK
    offset = rank * in_features
    rows = factors[0] + group.to(tl.int64) * group_strides[0] + offset
    valid = (slots < RANK) & (rank < ranks[0])
    for p in tl.static_range(1, len(factors)):
        hit = slots // RANK == p
        rows = tl.where(hit, factors[p] + group.to(tl.int64) * group_strides[p] + offset, rows)
        valid = valid | (hit & (rank < ranks[p]))
    return rows, valid


@triton.jit
def pair_of_part(part, parts):
    """Which pair the part of the out_features has, -1 if none."""
    pair = -1
    for p in tl.static_range(0, len(parts)):
        pair = tl.where(part == parts[p], p, pair)
    return pair


@triton.jit
def part_of_pair(pair, parts):
    """Which part of the out_features the pair has."""
    part = parts[0]
    for p in tl.static_range(1, len(parts)):
        part = tl.where(pair == p, parts[p], part)
    return part


@triton.jit
def pair_factor(factors, ranks, group_strides, group, pair):
    """Factors b: where the group's factor of one pair begins, and its rank; 0 for no pair."""
    factor = factors[0] + group.to(tl.int64) * group_strides[0]
    rank = tl.where(pair == 0, ranks[0], 0)
    for p in tl.static_range(1, len(factors)):
        here = factors[p] + group.to(tl.int64) * group_strides[p]
        factor = tl.where(pair == p, here, factor)
        rank = tl.where(pair == p, ranks[p], rank)
    return factor, rank
