"""Implementations by others, where their packages are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.backends import get_backend
from glm5.ops.grouped.reference import grouped_linear_reference

MEGATRON = "megatron tilelang"
LOOP = "torch loop"
# Megatron-Core selects by blocks of so many query rows.
_BLOCK_ROWS = 8192


@dataclass
class Peers:
    """Functions of each operation by name, with the signatures of the backends' functions."""

    sparse_mla: dict[str, Callable[..., Any]] = field(default_factory=dict)
    select_topk: dict[str, Callable[..., Any]] = field(default_factory=dict)
    indexer_kl: dict[str, Callable[..., Any]] = field(default_factory=dict)
    grouped_linear: dict[str, Callable[..., Any]] = field(default_factory=dict)
    missing: str = ""
    """Why a peer cannot run here; empty when all can."""


def find_peers() -> Peers:
    """A loop over experts, and Megatron-Core's TileLang kernels, when they can run here."""
    loop = {LOOP: grouped_linear_reference}
    try:
        backend = get_backend("tilelang")
    except BackendError as error:
        return Peers(grouped_linear=loop, missing=str(error))
    return Peers(
        sparse_mla={MEGATRON: backend.sparse_mla},
        select_topk={MEGATRON: _megatron_select_topk},
        indexer_kl={MEGATRON: backend.indexer_kl},
        grouped_linear=loop,
    )


def _megatron_select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """As Megatron-Core calls it: scores of whole rows and torch.topk, in no order of positions."""
    from megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa import (
        fused_qk_topk_lighting,
    )

    arguments = (q[:, None], k[:, None], weights[:, None], topk, starts, ends, _BLOCK_ROWS)
    selected: Tensor = fused_qk_topk_lighting(*arguments)[0]
    return selected
