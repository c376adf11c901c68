"""The discrete choices of one rollout, validated and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from glm5.config import Glm5Config
from glm5.errors import ReplayError
from glm5.model.selections import PackedSelection

# Of one block of a layer's rows while they are checked: a flag for every key of each.
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class ChoiceShape:
    """What of a model decides the shape of a record; layers are counted from 0."""

    num_layers: int
    full_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    index_topk: int

    @classmethod
    def from_config(cls, glm5: Glm5Config) -> Self:
        """Of the decoder alone: MTP layers are never recorded."""
        return cls(
            num_layers=glm5.num_hidden_layers,
            full_layers=_places(glm5.indexer_types, "full"),
            moe_layers=_places(glm5.mlp_layer_types, "sparse"),
            num_experts=glm5.n_routed_experts,
            experts_per_token=glm5.num_experts_per_tok,
            index_topk=glm5.index_topk,
        )


@dataclass(frozen=True)
class PackedExperts:
    """Experts that the routers chose, in the order in which the engine names them.

    experts [moe layers, tokens - 1, experts per token] uint8, or uint16 beyond 256 experts.
    """

    request: str
    layers: tuple[int, ...]
    experts: NDArray[np.unsignedinteger]

    @property
    def num_tokens(self) -> int:
        """Of the request, the last one too, which was no query."""
        return self.experts.shape[1] + 1

    @property
    def num_bytes(self) -> int:
        return self.experts.nbytes


@dataclass(frozen=True)
class PackedTopk:
    """Keys that the indexers chose, by full layer; of queries that see more than index_topk keys.

    No layer where no query does: all keys are selected then.
    """

    request: str
    num_tokens: int
    layers: Mapping[int, PackedSelection]

    @property
    def num_bytes(self) -> int:
        return sum(selection.num_bytes for selection in self.layers.values())


@dataclass(frozen=True)
class Choices:
    """What a rollout recorded; None where it did not."""

    experts: PackedExperts | None
    topk: PackedTopk | None

    def __post_init__(self) -> None:
        if self.experts is None or self.topk is None:
            return
        if self.experts.num_tokens != self.topk.num_tokens:
            raise ReplayError(
                f"request {self.topk.request}: its two records are of different tokens",
                got=f"experts of {self.experts.num_tokens} tokens, keys of {self.topk.num_tokens}",
                expected="both of prompt and response",
            )

    @property
    def num_tokens(self) -> int | None:
        """Of the request; None where nothing was recorded."""
        return next((part.num_tokens for part in self._parts), None)

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return sum(part.num_bytes for part in self._parts)

    @property
    def _parts(self) -> list[PackedExperts | PackedTopk]:
        return [part for part in (self.experts, self.topk) if part is not None]


def pack_topk(record: NDArray[np.int32], shape: ChoiceShape, *, request: str) -> PackedTopk:
    """Checks and packs the keys that an engine's indexers selected.

    record [tokens - 1, layers, index_topk] int32, of all layers or of the full ones alone: row t
    has the keys of token t, by their positions in the request, in any order, -1 after the last.

    Raises:
        ReplayError: it cannot be the record of a causal selection; names request, layer and token.
    """
    layers = _layers_of(record, shape, shape.full_layers, shape.index_topk, request)
    if len(layers) == shape.num_layers:
        _check_shared_layers(record, shape, request)
    num_tokens = len(record) + 1
    packed = {
        layer: _pack_layer(record[:, layers.index(layer)], shape.index_topk, request, layer)
        for layer in shape.full_layers
    }
    stored = packed if len(record) > shape.index_topk else {}
    return PackedTopk(request, num_tokens, stored)


def pack_experts(record: NDArray[np.int32], shape: ChoiceShape, *, request: str) -> PackedExperts:
    """Checks and packs the experts that an engine's routers chose.

    record [tokens - 1, layers, experts per token] int32, of all layers or of the sparse ones
    alone; what stands in the place of a dense layer is not read.

    Raises:
        ReplayError: it cannot be the record of a router; names request, layer and token.
    """
    layers = _layers_of(record, shape, shape.moe_layers, shape.experts_per_token, request)
    rows = record[:, [layers.index(layer) for layer in shape.moe_layers]]
    outside = (rows < 0) | (rows >= shape.num_experts)
    _refuse_first(
        outside.any(2).T,
        rows.transpose(1, 0, 2),
        shape.moe_layers,
        request,
        what="an expert does not exist",
        expected=f"experts from 0 to {shape.num_experts - 1}",
    )
    ordered = np.sort(rows, axis=2)
    twice = ordered[..., 1:] == ordered[..., :-1]
    _refuse_first(
        twice.any(2).T,
        rows.transpose(1, 0, 2),
        shape.moe_layers,
        request,
        what="an expert is named twice",
        expected=f"{shape.experts_per_token} different experts",
    )
    dtype = np.uint8 if shape.num_experts <= 256 else np.uint16
    packed = np.ascontiguousarray(rows.transpose(1, 0, 2).astype(dtype))
    return PackedExperts(request, shape.moe_layers, packed)


def _places(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(place for place, one in enumerate(kinds) if one == kind)


def _layers_of(
    record: NDArray[np.int32],
    shape: ChoiceShape,
    deciding: tuple[int, ...],
    width: int,
    request: str,
) -> tuple[int, ...]:
    """Which layers the record's second axis stands for."""
    every = tuple(range(shape.num_layers))
    for layers in (deciding, every):
        if record.dtype == np.int32 and record.shape[1:] == (len(layers), width):
            return layers
    raise ReplayError(
        f"request {request}: the record has the wrong shape",
        got=f"{list(record.shape)} {record.dtype}",
        expected=f"[tokens - 1, {shape.num_layers} or {len(deciding)}, {width}] int32",
        remedy="sample with an engine of the same config.json",
    )


def _check_shared_layers(record: NDArray[np.int32], shape: ChoiceShape, request: str) -> None:
    """A layer that shares keys has the very record of the full layer whose keys it uses."""
    source = 0
    for layer in range(shape.num_layers):
        if layer in shape.full_layers:
            source = layer
        elif not np.array_equal(record[:, layer], record[:, source]):
            token = int((record[:, layer] != record[:, source]).any(1).argmax())
            raise ReplayError(
                f"request {request}: layer {layer} shares the keys of layer {source}, and has "
                "others",
                got=f"{_shown(record[token, layer])} of token {token}",
                expected=_shown(record[token, source]),
                remedy="sample with an engine of the same indexer_types",
            )


def _pack_layer(keys: NDArray[np.int32], topk: int, request: str, layer: int) -> PackedSelection:
    """Checks every row of one layer; packs those of the queries that see more than topk keys."""
    num_rows = len(keys)
    _check_places(keys, topk, request, layer)
    block = max(1, _BLOCK_BYTES // max(1, num_rows))
    packed = [
        _pack_block(keys[first : first + block], first, num_rows, topk, request, layer)
        for first in range(0, num_rows, block)
    ]
    rows = np.concatenate(packed) if packed else np.zeros((0, 1), np.uint8)
    return PackedSelection(torch.from_numpy(rows), topk)


def _check_places(keys: NDArray[np.int32], topk: int, request: str, layer: int) -> None:
    """Token t has min(t + 1, topk) keys from 0 to t, and -1 in the places after them."""
    tokens = np.arange(len(keys))[:, None]

    def refuse(wrong: NDArray[np.bool_], what: str, expected: str) -> None:
        _refuse_first(wrong[None], keys[None], (layer,), request, what=what, expected=expected)

    refuse((keys > tokens).any(1), "a key stands after its query", "keys up to the token itself")
    refuse((keys < -1).any(1), "a key does not exist", "positions in the request, or -1 for none")
    given = keys >= 0
    refuse(
        (given[:, 1:] & ~given[:, :-1]).any(1),
        "a key stands behind a place that is empty",
        "-1 after the last key alone",
    )
    refuse(
        given.sum(1) != np.minimum(tokens[:, 0] + 1, topk),
        "a query has the wrong number of keys",
        f"all that it sees, but at most {topk}",
    )


def _pack_block(
    keys: NDArray[np.int32], first: int, num_keys: int, topk: int, request: str, layer: int
) -> NDArray[np.generic]:
    """Rows first, first + 1, ... of a layer: none twice; those that select, in the smallest form.

    A bitmap has num_keys / 8 bytes, 16 bits reach up to position 65,535, and 32 bits everywhere.
    """
    flags = np.zeros((len(keys), num_keys + 1), np.bool_)
    # -1 is the spare column at the end
    np.put_along_axis(flags, keys.astype(np.intp), True, axis=1)
    flags = flags[:, :num_keys]
    _refuse_first(
        (flags.sum(1) != (keys >= 0).sum(1))[None],
        keys[None],
        (layer,),
        request,
        first=first,
        what="a key is named twice",
        expected="different keys",
    )
    selecting = flags[max(0, topk - first) :]
    position = np.uint16 if num_keys <= 2**16 else np.int32
    if -(-num_keys // 8) <= topk * np.dtype(position).itemsize:
        return np.packbits(selecting, axis=1, bitorder="little")
    return selecting.nonzero()[1].astype(position).reshape(-1, topk)


def _refuse_first(
    wrong: NDArray[np.bool_],
    rows: NDArray[np.int32],
    layers: Sequence[int],
    request: str,
    *,
    what: str,
    expected: str,
    first: int = 0,
) -> None:
    """Raises for the first of wrong [layers, tokens] that is true, showing its row."""
    if not wrong.any():
        return
    place, token = divmod(int(wrong.argmax()), wrong.shape[1])
    raise ReplayError(
        f"request {request}: {what} in layer {layers[place]}, token {first + token}",
        got=_shown(rows[place, token]),
        expected=expected,
        remedy="check that engine and trainer have one model and tokenise alike",
    )


def _shown(row: NDArray[np.int32]) -> str:
    """A row as text; the ends of a long one."""
    return np.array2string(row, threshold=16, edgeitems=4, max_line_width=120)
