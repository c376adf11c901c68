"""Sees which experts and keys a `transformers` model chooses, by forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glm5.config import Glm5Config
from glm5.rl.recorded import STREAMS, Recorded

Record = NDArray[np.int32]


class HfRecorder:
    """Keeps what the routers and indexers chose in the last forward of a model."""

    def __init__(self, glm5: Glm5Config, recorded: Recorded) -> None:
        self._glm5 = glm5
        self._experts: list[Tensor] | None = [] if "experts" in STREAMS[recorded] else None
        self._topk: list[Tensor] | None = [] if "topk" in STREAMS[recorded] else None

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Hooks on the model while open."""
        handles = [
            module.register_forward_hook(hook)
            for layer in model.model.layers
            for module, hook in self._watched(layer)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, first_keys: Tensor, positions: Tensor) -> tuple[Record | None, Record | None]:
        """(experts, keys) that the forward just done chose; forgets them.

        first_keys [b]: where a row's first token lies among its keys, behind left padding.
        positions [b, s]: of the queries, counted from their row's first token.
        -> experts [b, s, sparse layers, num_experts_per_tok] int32, None where not recorded;
           keys [b, s, "full" layers, index_topk] int32 counted from the row's first token, -1 for
           none: before the first token, after the query, or beyond the keys that there were.
        """
        experts = keys = None
        if self._experts is not None:
            parts = [part.view(*positions.shape, -1) for part in self._experts]
            assert len(parts) == self._glm5.mlp_layer_types.count("sparse")
            experts = _to_numpy(_stack(parts, positions, self._glm5.num_experts_per_tok))
            self._experts.clear()
        if self._topk is not None:
            assert len(self._topk) == self._glm5.indexer_types.count("full")
            chosen = _stack(self._topk, positions, self._glm5.index_topk)
            keys = _to_numpy(_request_relative(chosen, first_keys, positions))
            self._topk.clear()
        return experts, keys

    def _watched(self, layer: Any) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        if self._topk is not None and layer.self_attn.indexer is not None:
            yield layer.self_attn.indexer, self._see_indexer
        if self._experts is not None and hasattr(layer.mlp, "gate"):
            yield layer.mlp.gate, self._see_router

    def _see_indexer(self, module: nn.Module, args: Any, output: Tensor) -> None:
        assert self._topk is not None
        self._topk.append(output.detach())

    def _see_router(self, module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        # logits, weights, experts
        assert self._experts is not None
        self._experts.append(output[2].detach())


def _stack(parts: list[Tensor], positions: Tensor, width: int) -> Tensor:
    """[b, s, layers, width] int32; fewer keys than index_topk are all there were."""
    chosen = positions.new_full((*positions.shape, len(parts), width), -1, dtype=torch.int32)
    for layer, part in enumerate(parts):
        chosen[:, :, layer, : part.shape[-1]] = part
    return chosen


def _request_relative(chosen: Tensor, first_keys: Tensor, positions: Tensor) -> Tensor:
    keys = chosen - first_keys[:, None, None, None].int()
    allowed = (chosen >= 0) & (keys >= 0) & (keys <= positions[:, :, None, None])
    return torch.where(allowed, keys, -1)


def _to_numpy(chosen: Tensor) -> Record:
    array: Record = chosen.int().cpu().numpy()
    return array
