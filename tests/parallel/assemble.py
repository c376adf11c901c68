"""Puts the parts that ranks hold of a tensor together, knowing nothing but the whole's shape."""

from typing import Any

import torch
from torch import Tensor


def assemble(ranks: list[dict[str, Any]], key: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors of `key` ("gradients" or "weights") by global name.

    Ranks of one (expert) tensor-parallel rank must hold the same bits of a tensor, and so must all
    ranks of one that is not cut.
    """
    whole = {}
    for name in sorted({name for rank in ranks for name in rank[key]}):
        parts: dict[int, Tensor] = {}
        axis = "etp_rank" if ".experts." in name else "tp_rank"
        for rank in ranks:
            if name in rank[key]:
                part = parts.setdefault(rank[axis], rank[key][name])
                assert torch.equal(part, rank[key][name]), f"{name}: replicas differ"
        whole[name] = _join(name, [parts[rank] for rank in sorted(parts)], like[name].shape)
    return whole


def _join(name: str, parts: list[Tensor], shape: torch.Size) -> Tensor:
    if parts[0].shape == shape:
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name}: tp replicas differ"
        return parts[0]
    (dim,) = (i for i, size in enumerate(shape) if parts[0].shape[i] != size)
    if name.endswith("linear_fc1.weight"):
        # every rank holds its rows of gate above its rows of up
        gates_and_ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([torch.cat(side) for side in gates_and_ups])
    return torch.cat(parts, dim)
