"""From the choices of a micro-batch's rollouts to what its forward replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from glm5.errors import ReplayError
from glm5.model.replay import Replay
from glm5.model.selections import DocumentSelection, LayerSelections
from glm5.rl.choices import Choices, ChoiceShape, PackedExperts, PackedTopk
from glm5.rl.recorded import STREAMS, Recorded


def build_replay(
    documents: Sequence[Choices | None],
    lengths: Sequence[int],
    recorded: Recorded,
    shape: ChoiceShape,
    device: torch.device,
    num_tokens: int,
) -> Replay:
    """What the documents of a packed row chose, and nothing for the padding behind them.

    lengths: tokens of each document, its last one too; num_tokens: of the whole row. A document of
    one token has no choices: None. The keys stay packed on the host, and are not copied.

    Raises:
        ReplayError: a document has no record of what `recorded` names, or one of another length.
    """
    assert sum(lengths) <= num_tokens, f"documents of {sum(lengths)} tokens in {num_tokens}"
    experts, topk = None, None
    if "experts" in STREAMS[recorded]:
        packed = list(_records(documents, lengths, lambda choices: choices.experts))
        experts = _experts(packed, shape, device, num_tokens)
    if "topk" in STREAMS[recorded]:
        selected = list(_records(documents, lengths, lambda choices: choices.topk))
        topk = {layer: _selections(selected, shape, layer) for layer in shape.full_layers}
    return Replay(experts, topk)


def _records[T: (PackedExperts, PackedTopk)](
    documents: Sequence[Choices | None],
    lengths: Sequence[int],
    record_of: Callable[[Choices], T | None],
) -> Iterator[tuple[int, T]]:
    """Where each document of more than one token starts, and its record."""
    start = 0
    for number, (choices, length) in enumerate(zip(documents, lengths, strict=True)):
        if length > 1:
            record = None if choices is None else record_of(choices)
            if record is None or record.num_tokens != length:
                raise ReplayError(
                    f"document {number} of a micro-batch has no record of its choices"
                    if record is None
                    else f"request {record.request}: the record is of other tokens",
                    got=None if record is None else f"a record of {record.num_tokens} tokens",
                    expected=f"a record of {length} tokens",
                    remedy="let the engine record what is replayed, for every rollout",
                )
            yield start, record
        start += length


def _experts(
    records: Sequence[tuple[int, PackedExperts]],
    shape: ChoiceShape,
    device: torch.device,
    num_tokens: int,
) -> dict[int, Tensor]:
    """Of every sparse layer [num_tokens, experts per token], -1 where there is no record."""
    size = (len(shape.moe_layers), num_tokens, shape.experts_per_token)
    experts = np.full(size, -1, np.int16 if shape.num_experts <= 2**15 else np.int32)
    for start, record in records:
        experts[:, start : start + record.num_tokens - 1] = record.experts
    whole = torch.from_numpy(experts)
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return dict(zip(shape.moe_layers, whole, strict=True))


def _selections(
    records: Sequence[tuple[int, PackedTopk]], shape: ChoiceShape, layer: int
) -> LayerSelections:
    documents = (
        DocumentSelection(start, record.layers[layer])
        for start, record in records
        if layer in record.layers
    )
    return LayerSelections(shape.index_topk, tuple(documents))
