"""Adapters of all experts of a layer as the one pair of matrices that PEFT keeps for them."""

from collections.abc import Mapping

import torch

from glm5.checkpoint.adapter import LoraFactors, padded, rescaled
from glm5.checkpoint.adapter_layout import FusedWeight


def fuse_experts(
    weight: FusedWeight,
    factors: Mapping[str, LoraFactors],
    *,
    num_experts: int,
    shape: tuple[int, int],
    rank: int,
    scale: float,
    dtype: torch.dtype,
) -> LoraFactors:
    """Lay the experts' factors out as PEFT's ParamWrapper reads them, n = len(projections).

    a [num_experts * n*rank, in], rows expert-major; b [n*out, n*rank * num_experts], columns
    rank-major and expert-minor. Each projection keeps its own a: b is block-diagonal. A linear
    absent from `factors` gets zeros, and so do missing ranks, which is exact; another scale is
    taken up by b (`rescaled`). `shape` is (out, in) of one projection.
    """
    n = len(weight.projections)
    out_features, in_features = shape
    a = torch.zeros(num_experts, n, rank, in_features, dtype=dtype)
    b = torch.zeros(num_experts, n, out_features, n, rank, dtype=dtype)
    for expert in range(num_experts):
        for i, projection in enumerate(weight.projections):
            path = weight.path(expert, projection)
            if path in factors:
                pair = padded(rescaled(factors[path], scale), rank)
                a[expert, i] = pair.a
                b[expert, i, :, i] = pair.b
    return LoraFactors(
        a.reshape(num_experts * n * rank, in_features),
        # as two dimensions, which torch transposes much faster than five
        b.reshape(num_experts, -1).t().reshape(n * out_features, n * rank * num_experts),
        scale,
    )


def is_block_diagonal(weight: FusedWeight, fused: LoraFactors, *, num_experts: int) -> bool:
    """Whether each projection of `fused` uses only its own share of the rank (see fuse_experts)."""
    n = len(weight.projections)
    rank = fused.a.shape[0] // num_experts
    if rank % n:
        return False
    blocks = fused.b.reshape(n, fused.b.shape[0] // n, n, -1)
    return not any(blocks[i, :, j].any() for i in range(n) for j in range(n) if i != j)


def adapted_linears(
    weight: FusedWeight, fused: LoraFactors, *, num_experts: int, split_rank: bool
) -> dict[tuple[int, int], str]:
    """(expert, projection) -> Hugging Face path of the linears whose a or b is not all zero."""
    n = len(weight.projections)
    shares = n if split_rank else 1
    a = fused.a.reshape(num_experts, shares, -1).any(2).expand(num_experts, n)
    b = fused.b.reshape(n, fused.b.shape[0] // n, shares, -1, num_experts)
    b_own = torch.stack([b[i, :, i % shares].flatten(0, 1).any(0) for i in range(n)], dim=1)
    return {
        (expert, i): weight.path(expert, weight.projections[i])
        for expert, i in (a | b_own).nonzero().tolist()
    }


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
    # the experts first, so that each one's share is read in one go
    b = fused.b.reshape(-1, num_experts).t().contiguous()
    b = b.reshape(num_experts, n, fused.b.shape[0] // n, full_rank)
    factors = {}
    adapted = adapted_linears(weight, fused, num_experts=num_experts, split_rank=split_rank)
    for (expert, i), path in adapted.items():
        own = slice(i * rank, (i + 1) * rank) if split_rank else slice(None)
        # Copies, so that the fused matrices can be freed.
        factors[path] = LoraFactors(
            a[expert, own].clone(),
            b[expert, i, :, own].clone(memory_format=torch.contiguous_format),
            fused.scale,
        )
    return factors
