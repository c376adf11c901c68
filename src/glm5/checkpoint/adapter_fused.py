"""Adapters of all experts of a layer as the one pair of matrices that PEFT keeps for them."""

from collections.abc import Mapping

import torch

from glm5.checkpoint.adapter_layout import FusedWeight, LoraFactors


def fuse_experts(
    weight: FusedWeight,
    factors: Mapping[str, LoraFactors],
    *,
    num_experts: int,
    shape: tuple[int, int],
) -> LoraFactors:
    """Lay the experts' factors out as PEFT's ParamWrapper reads them, n = len(projections).

    a [num_experts * n*rank, in], rows expert-major; b [n*out, n*rank * num_experts], columns
    rank-major and expert-minor. Each projection keeps its own a: b is block-diagonal. A linear
    absent from `factors` gets zeros, which is exact. `shape` is (out, in) of one projection; all
    factors have one rank and one dtype, which the result keeps.
    """
    first = next(iter(factors.values())).a
    rank, dtype = first.shape[0], first.dtype
    n = len(weight.projections)
    out_features, in_features = shape
    a = torch.zeros(num_experts, n, rank, in_features, dtype=dtype)
    b = torch.zeros(n, out_features, n, rank, num_experts, dtype=dtype)
    for expert in range(num_experts):
        for i, projection in enumerate(weight.projections):
            pair = factors.get(weight.path(expert, projection))
            if pair is not None:
                a[expert, i] = pair.a
                b[i, :, i, :, expert] = pair.b
    return LoraFactors(
        a.reshape(num_experts * n * rank, in_features),
        b.reshape(n * out_features, n * rank * num_experts),
    )


def is_block_diagonal(weight: FusedWeight, fused: LoraFactors, *, num_experts: int) -> bool:
    """Whether each projection of `fused` uses only its own share of the rank (see fuse_experts)."""
    n = len(weight.projections)
    rank = fused.a.shape[0] // num_experts
    if rank % n:
        return False
    blocks = fused.b.reshape(n, fused.b.shape[0] // n, n, -1)
    return not any(blocks[i, :, j].any() for i in range(n) for j in range(n) if i != j)


def split_experts(
    weight: FusedWeight, fused: LoraFactors, *, num_experts: int, split_rank: bool
) -> dict[str, LoraFactors]:
    """The inverse of fuse_experts: Hugging Face path -> factors, those that are all zero left out.

    split_rank: b is block-diagonal, so each projection takes its share of the rank. Otherwise
    the projections share a and take their rows of b, all of the rank: the same delta exactly.
    """
    n = len(weight.projections)
    full_rank = fused.a.shape[0] // num_experts
    rank = full_rank // n if split_rank else full_rank
    a = fused.a.reshape(num_experts, full_rank, -1)
    b = fused.b.reshape(n, fused.b.shape[0] // n, full_rank, num_experts)
    factors = {}
    for expert in range(num_experts):
        for i, projection in enumerate(weight.projections):
            own = slice(i * rank, (i + 1) * rank) if split_rank else slice(None)
            a_own, b_own = a[expert, own], b[i, :, own, expert]
            if a_own.any() or b_own.any():
                # Copies, so that the fused matrices can be freed.
                factors[weight.path(expert, projection)] = LoraFactors(
                    a_own.clone(), b_own.clone(memory_format=torch.contiguous_format)
                )
    return factors
