"""Records of discrete choices: those that a model makes, and drawn ones that nobody would make."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.config import Glm5Config
from glm5.model.replay import Replay
from glm5.model.selections import DocumentSelection, LayerSelections, PackedSelection
from glm5.rl.choices import Choices, ChoiceShape, pack_experts, pack_topk


class Recorder:
    """An observer that keeps all that one forward of one process shows."""

    def __init__(self) -> None:
        self.experts: dict[int, Tensor] = {}
        self.topk: dict[int, Tensor] = {}

    def see_experts(self, layer: int, tokens: range, experts: Tensor) -> None:
        assert layer not in self.experts and tokens == range(len(experts))
        self.experts[layer] = experts.clone()

    def see_topk(self, layer: int, queries: range, topk_indices: Tensor) -> None:
        assert layer not in self.topk and queries == range(len(topk_indices))
        self.topk[layer] = topk_indices.clone()

    def replay(self, lengths: Sequence[int]) -> Replay:
        """Of every row, the last ones of documents too, which no engine records."""
        topk = {
            layer: LayerSelections(keys.shape[1], tuple(_selections(keys, lengths)))
            for layer, keys in self.topk.items()
        }
        return Replay(self.experts, topk)

    def records(self, lengths: Sequence[int], glm5: Glm5Config) -> list["Record"]:
        """What an engine would have recorded of each document."""
        shape, records, start = ChoiceShape.from_config(glm5), [], 0
        for length in lengths:
            experts = {n: t[start : start + length - 1].numpy() for n, t in self.experts.items()}
            topk = {
                n: _relative(t[start : start + length - 1], start) for n, t in self.topk.items()
            }
            records.append(Record.of_layers(experts, topk, length, shape))
            start += length
        return records


class Record(NamedTuple):
    """[tokens - 1, layers, k] int32 of all layers, as an engine sends them."""

    experts: NDArray[np.int32]
    topk: NDArray[np.int32]

    @classmethod
    def of_layers(
        cls,
        experts: dict[int, NDArray[np.int64]],
        topk: dict[int, NDArray[np.int32]],
        length: int,
        shape: ChoiceShape,
    ) -> "Record":
        """Dense layers have zeros, shared ones what they reuse."""
        nothing = np.zeros((length - 1, shape.experts_per_token), np.int32)
        routed = [experts.get(layer, nothing) for layer in range(shape.num_layers)]
        sources = [max(f for f in topk if f <= layer) for layer in range(shape.num_layers)]
        return cls(np.stack(routed, 1).astype(np.int32), np.stack([topk[s] for s in sources], 1))

    def pack(self, shape: ChoiceShape, request: str = "r") -> Choices:
        return Choices(
            pack_experts(self.experts, shape, request=request),
            pack_topk(self.topk, shape, request=request),
        )


def drawn_record(length: int, shape: ChoiceShape, seed: int) -> Record:
    """A valid record that has nothing to do with any model; keys in any order."""
    draw = np.random.default_rng([seed, length])
    size = (length - 1, shape.num_experts)
    experts = {
        layer: draw.random(size).argsort(axis=1)[:, : shape.experts_per_token]
        for layer in shape.moe_layers
    }
    topk = {layer: _drawn_keys(length - 1, shape.index_topk, draw) for layer in shape.full_layers}
    return Record.of_layers(experts, topk, length, shape)


def _drawn_keys(num_rows: int, topk: int, draw: np.random.Generator) -> NDArray[np.int32]:
    order = draw.random((num_rows, max(num_rows, topk)))
    hidden = np.arange(order.shape[1]) > np.arange(num_rows)[:, None]
    keys = np.where(hidden, 2.0, order).argsort(axis=1)[:, :topk].astype(np.int32)
    return np.where(keys > np.arange(num_rows)[:, None], -1, keys).astype(np.int32)


def _selections(keys: Tensor, lengths: Sequence[int]) -> list[DocumentSelection]:
    topk, start, found = keys.shape[1], 0, []
    for length in lengths:
        if length > topk:
            rows = keys[start + topk : start + length] - start
            found.append(DocumentSelection(start, PackedSelection(rows, topk)))
        start += length
    return found


def _relative(keys: Tensor, start: int) -> NDArray[np.int32]:
    """Of a document's own tokens; an engine names all keys where a short one attends densely."""
    columns = torch.arange(keys.shape[1])
    everything = torch.where(columns <= torch.arange(len(keys))[:, None], columns, -1)
    dense = (keys < 0).all(1, keepdim=True)
    relative = torch.where(dense, everything, torch.where(keys < 0, -1, keys - start))
    return relative.to(torch.int32).numpy()
