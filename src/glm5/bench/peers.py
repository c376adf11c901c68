"""Implementations by others, where their packages are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.backends import get_backend
from glm5.ops.grouped.reference import grouped_linear_reference

MEGATRON = "megatron tilelang"
CUDNN = "cudnn"
FLASH_MLA = "flash_mla"
LOOP = "torch loop"
# Megatron-Core selects by blocks of so many query rows.
_BLOCK_ROWS = 8192


@dataclass
class Peers:
    """Functions of each operation by name, with the signatures of the backends' functions."""

    sparse_mla: dict[str, Callable[..., Any]] = field(default_factory=dict)
    sparse_mla_with_mass: dict[str, Callable[..., Any]] = field(default_factory=dict)
    select_topk: dict[str, Callable[..., Any]] = field(default_factory=dict)
    indexer_kl: dict[str, Callable[..., Any]] = field(default_factory=dict)
    grouped_linear: dict[str, Callable[..., Any]] = field(default_factory=dict)
    only: dict[str, str] = field(default_factory=dict)
    """The one pass of sparse_mla, "forward" or "backward", that is the peer's: the other is ours,
    and is not timed again."""
    missing: str = ""
    """Why peers cannot run here; empty when all can."""


def find_peers() -> Peers:
    """A loop over experts, and, when they can run here, Megatron-Core's TileLang kernels, cuDNN's
    backward and FlashMLA's forward."""
    peers, missing = Peers(grouped_linear={LOOP: grouped_linear_reference}), []
    for add in (_add_megatron, _add_cudnn, _add_flash_mla):
        try:
            add(peers)
        except BackendError as error:
            missing.append(str(error))
    peers.missing = "\n".join(missing)
    return peers


def _add_megatron(peers: Peers) -> None:
    backend = get_backend("tilelang")
    peers.sparse_mla[MEGATRON] = backend.sparse_mla
    peers.sparse_mla_with_mass[MEGATRON] = backend.sparse_mla_with_mass
    peers.select_topk[MEGATRON] = _megatron_select_topk
    peers.indexer_kl[MEGATRON] = backend.indexer_kl


def _add_cudnn(peers: Peers) -> None:
    """cuDNN's backward for any number of heads: the backend uses it where it is the faster one."""
    get_backend("cudnn")
    from glm5.ops.sparse_mla.autograd import attend_with
    from glm5.ops.sparse_mla.cudnn import CudnnKernels

    peers.sparse_mla[CUDNN] = partial(attend_with, CudnnKernels())
    peers.only[CUDNN] = "backward"


def _add_flash_mla(peers: Peers) -> None:
    try:
        from glm5.bench.flash_mla import FlashMlaKernels
    except (ImportError, OSError) as error:
        raise BackendError(
            "FlashMLA cannot run here",
            got=error,
            remedy="pip install --no-deps sgl-flash-mla, or build it from its repository",
        ) from error
    from glm5.ops.sparse_mla.autograd import attend_with

    peers.sparse_mla[FLASH_MLA] = partial(attend_with, FlashMlaKernels())
    peers.only[FLASH_MLA] = "forward"


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
