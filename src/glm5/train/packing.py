"""Pack tokenised chats into rows of a fixed capacity, and order rows into batches."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.errors import DataError
from glm5.train.chat import TokenizedChat
from glm5.train.data import Problems

TooLong = Literal["error", "truncate", "skip"]

# Chats are sorted by length only inside a window, so that rows keep near the data's order.
PACKING_WINDOW = 1024


@dataclass(frozen=True)
class PackedRow:
    """Whole documents laid end to end (thd); also several rows joined to a micro-batch.

    input_ids: [t] int64.
    labels: [t] int64; the next token of the same document, and for a document's last token that
        token itself (its loss_mask is 0).
    loss_mask: [t] float32; 1 where the label is an assistant's token, else 0.
    cu_seqlens: [num_documents + 1] int32; document d is [cu_seqlens[d], cu_seqlens[d + 1]).
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, padding included."""
        return self.input_ids.numel()


def build_row(chats: Sequence[TokenizedChat]) -> PackedRow:
    """Lay chats end to end; the one place where labels are shifted: labels[i] = input_ids[i + 1].

    No chats give an empty row with cu_seqlens [0].
    """
    lengths = [len(chat) for chat in chats]
    input_ids = np.concatenate([np.zeros(0, np.int64), *(chat.input_ids for chat in chats)])
    produced = np.concatenate([np.zeros(0, np.bool_), *(chat.loss_mask for chat in chats)])
    ends = np.cumsum(lengths, dtype=np.int64)
    last = ends[ends > 0] - 1
    labels, loss_mask = np.roll(input_ids, -1), np.roll(produced, -1)
    labels[last], loss_mask[last] = input_ids[last], False
    return PackedRow(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask.astype(np.float32)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
    )


def pad_row(row: PackedRow, length: int, pad_token_id: int) -> PackedRow:
    """Fill a row up to `length` tokens with documents of one pad token each and no loss.

    A token that sees only itself adds nothing to the indexer's loss, either. A row of exactly
    `length` tokens comes back as it is.

    Raises:
        DataError: the row is longer than `length`.
    """
    missing = length - row.num_tokens
    if missing < 0:
        raise DataError("a row is too long to pad", got=row.num_tokens, expected=f"<= {length}")
    if missing == 0:
        return row
    pad = np.full(1, pad_token_id, dtype=np.int32)
    filler = TokenizedChat(pad, np.zeros(1, dtype=np.bool_), "padding")
    return concat_rows([row, build_row([filler] * missing)])


def concat_rows(rows: Sequence[PackedRow]) -> PackedRow:
    """Join rows to one micro-batch; documents stay apart through cu_seqlens. Needs one row."""
    offsets = np.cumsum([0, *(row.num_tokens for row in rows[:-1])])
    bounds = [rows[0].cu_seqlens[:1]]
    bounds += [row.cu_seqlens[1:] + int(start) for row, start in zip(rows, offsets, strict=True)]
    return PackedRow(
        input_ids=torch.cat([row.input_ids for row in rows]),
        labels=torch.cat([row.labels for row in rows]),
        loss_mask=torch.cat([row.loss_mask for row in rows]),
        cu_seqlens=torch.cat(bounds),
    )


def plan_rows(lengths: Sequence[int], seq_length: int) -> list[tuple[int, ...]]:
    """Assign documents to rows by best-fit decreasing, window by window.

    Args:
        lengths: tokens of each document, each in [1, seq_length].
        seq_length: capacity of a row [tokens].

    Returns:
        Document indices of each row, ascending; rows ordered by their first document. Every
        document is in exactly one row.
    """
    rows: list[tuple[int, ...]] = []
    for start in range(0, len(lengths), PACKING_WINDOW):
        window = range(start, min(start + PACKING_WINDOW, len(lengths)))
        rows += _plan_window(window, lengths, seq_length)
    return rows


def _plan_window(window: range, lengths: Sequence[int], seq_length: int) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for document in sorted(window, key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        assert 1 <= length <= seq_length
        slot = bisect_left(free, (length, -1))
        if slot == len(free):
            rows.append([])
            left, row = seq_length, len(rows) - 1
        else:
            left, row = free.pop(slot)
        rows[row].append(document)
        insort(free, (left - length, row))
    return sorted(tuple(sorted(row)) for row in rows)


class PackedDataset:
    """Chats packed into rows; `dataset[i]` builds row i.

    Attributes:
        num_truncated: chats that were cut to seq_length tokens.
        num_skipped: chats left out, as too long or with no assistant token left after the cut.
    """

    def __init__(
        self,
        chats: Sequence[TokenizedChat],
        seq_length: int,
        *,
        too_long: TooLong = "error",
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        """Pack `chats` into rows of at most `seq_length` tokens; the same seed, the same rows.

        Raises:
            DataError: too_long is "error" and a chat does not fit (all are listed), or no chat
                is left.
        """
        self.seq_length = seq_length
        fitting, self.num_truncated, self.num_skipped = _fit(chats, seq_length, too_long)
        if not fitting:
            raise DataError("no chat is left to train on", got=f"{self.num_skipped} skipped")
        order = _permutation(seed, 0, len(fitting)) if shuffle else range(len(fitting))
        self._chats = [fitting[index] for index in order]
        self._rows = plan_rows([len(chat) for chat in self._chats], seq_length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PackedRow:
        return build_row([self._chats[document] for document in self._rows[index]])

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows."""
        return sum(len(chat) for chat in self._chats)

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens, in (0, 1]."""
        return self.num_tokens / (len(self) * self.seq_length)


def _fit(
    chats: Sequence[TokenizedChat], seq_length: int, too_long: TooLong
) -> tuple[list[TokenizedChat], int, int]:
    fitting: list[TokenizedChat] = []
    problems, num_truncated, num_skipped = Problems(), 0, 0
    for chat in chats:
        if len(chat) <= seq_length:
            fitting.append(chat)
        elif too_long == "error":
            problems.add(chat.source, f"{len(chat)} tokens, more than seq_length {seq_length}")
        elif too_long == "truncate" and chat.loss_mask[1:seq_length].any():
            num_truncated += 1
            fitting.append(_truncated(chat, seq_length))
        else:
            num_skipped += 1
    problems.raise_if_any(
        "chats that are too long",
        "raise data.seq_length, or set data.too_long to truncate or skip",
    )
    return fitting, num_truncated, num_skipped


def _truncated(chat: TokenizedChat, length: int) -> TokenizedChat:
    return TokenizedChat(chat.input_ids[:length], chat.loss_mask[:length], chat.source)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    # Raw bits of a bit generator are stable across numpy versions; permutation() is not.
    keys = np.random.PCG64([seed, epoch]).random_raw(size)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class BatchOrder:
    """Endless order of rows, epoch after epoch, as a pure function of (seed, step).

    Position p = step * global_batch_size + j takes row permutation(seed, p // num_rows)[p %
    num_rows]; without shuffle every epoch has the rows' own order. A batch may span epochs.
    """

    num_rows: int
    global_batch_size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.num_rows >= 1 and self.global_batch_size >= 1

    def rows(self, step: int) -> list[int]:
        """Return the global_batch_size row indices of optimizer step `step` (from 0)."""
        assert step >= 0
        first = step * self.global_batch_size
        return [self._row_at(first + offset) for offset in range(self.global_batch_size)]

    def _row_at(self, position: int) -> int:
        epoch, index = divmod(position, self.num_rows)
        if not self.shuffle:
            return index
        # Stream 0 of the seed orders the chats before packing.
        return int(_permutation(self.seed, epoch + 1, self.num_rows)[index])
