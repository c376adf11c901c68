"""Completions packed end to end, with what the policy's loss needs to know of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.rl.rollout import Rollout
from glm5.train.chat import TokenizedChat
from glm5.train.packing import PackedRow, build_row, pad_row

NO_SEQUENCE = -1


@dataclass(frozen=True)
class Document:
    """One completion that is learnt from; `number` counts those of the step, over all ranks."""

    number: int
    rollout: Rollout
    advantage: float

    @property
    def num_tokens(self) -> int:
        return self.rollout.num_tokens


@dataclass(frozen=True)
class PolicyRow:
    """A micro-batch. All of these are [t], and speak of the label of each token.

    packed: as in supervised fine-tuning; its loss_mask is 1 where the label is a response token.
    advantages, rollout_log_probs: float32. sequences: int64, the number of the completion, -1
    where the label is no response token. positions: int64, index of the label in prompt and
    response together. documents: numbers of the completions, in the order of packed.cu_seqlens;
    documents of padding come after them.
    """

    packed: PackedRow
    advantages: Tensor
    rollout_log_probs: Tensor
    sequences: Tensor
    positions: Tensor
    documents: tuple[int, ...]


def policy_row(documents: Sequence[Document], length: int | None, pad_token_id: int) -> PolicyRow:
    """Lays completions end to end, and fills up to `length` tokens if that is given.

    Without completions it is one document of padding that has no loss: ranks must meet.
    """
    packed = build_row([_chat(document.rollout) for document in documents])
    if length is None:
        length = max(1, packed.num_tokens)
    packed = pad_row(packed, length, pad_token_id) if documents else _padding(length, pad_token_id)
    values: dict[str, NDArray[Any]] = {
        "advantages": np.zeros(length, np.float32),
        "rollout_log_probs": np.zeros(length, np.float32),
        "sequences": np.full(length, NO_SEQUENCE, np.int64),
        "positions": np.zeros(length, np.int64),
    }
    start = 0
    for document in documents:
        _place(document, start, values)
        start += document.num_tokens
    tensors = {name: torch.from_numpy(array) for name, array in values.items()}
    return PolicyRow(packed, **tensors, documents=tuple(d.number for d in documents))


def _place(document: Document, start: int, values: Mapping[str, NDArray[Any]]) -> None:
    """Writes what is known of a completion whose first token stands at `start`."""
    prompt, response = len(document.rollout.prompt_ids), len(document.rollout.response_ids)
    # the token before each response token has it for its label
    labels = slice(start + prompt - 1, start + prompt - 1 + response)
    values["advantages"][labels] = document.advantage
    values["rollout_log_probs"][labels] = document.rollout.log_probs
    values["sequences"][labels] = document.number
    values["positions"][labels] = np.arange(prompt, prompt + response)


def _chat(rollout: Rollout) -> TokenizedChat:
    produced = np.zeros(rollout.num_tokens, np.bool_)
    produced[len(rollout.prompt_ids) :] = True
    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    return TokenizedChat(ids, produced, rollout.request)


def _padding(length: int, pad_token_id: int) -> PackedRow:
    pad = TokenizedChat(np.full(1, pad_token_id, np.int32), np.zeros(1, np.bool_), "padding")
    return build_row([pad] * length)
