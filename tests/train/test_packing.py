"""Packing: every token once, labels inside their document, an order that needs no state."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from glm5.errors import DataError
from glm5.train.chat import TokenizedChat
from glm5.train.packing import (
    PACKING_WINDOW,
    BatchOrder,
    PackedDataset,
    PackedRow,
    build_row,
    concat_rows,
    pad_row,
    plan_rows,
)

PAD = 999


def chat(ids: list[int], mask: list[int] | None = None, source: str = "f:1") -> TokenizedChat:
    mask = [1] * len(ids) if mask is None else mask
    return TokenizedChat(np.array(ids, np.int32), np.array(mask, np.bool_), source)


def chats_of(*lengths: int) -> list[TokenizedChat]:
    """Chats whose tokens tell which chat they are from: 100 * chat + position."""
    return [
        chat([100 * (i + 1) + j for j in range(length)], source=f"f:{i + 1}")
        for i, length in enumerate(lengths)
    ]


def documents(row: PackedRow) -> list[list[int]]:
    bounds = row.cu_seqlens.tolist()
    return [row.input_ids[i:j].tolist() for i, j in pairwise(bounds)]


def assert_equal_rows(left: PackedRow, right: PackedRow) -> None:
    for name in ("input_ids", "labels", "loss_mask", "cu_seqlens"):
        mine, other = getattr(left, name), getattr(right, name)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), name


def test_row_shifts_labels_inside_each_document() -> None:
    row = build_row([chat([1, 2, 3, 4], [0, 0, 1, 1]), chat([5, 6], [1, 1]), chat([7], [1])])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.cu_seqlens.tolist() == [0, 4, 6, 7]
    # Position 3 would predict 5 across the boundary: its loss is off though 5 is an assistant's.
    assert row.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0]
    assert row.labels.tolist() == [2, 3, 4, 4, 6, 6, 7]


def test_row_dtypes_and_labels_are_valid_tokens() -> None:
    row = build_row(chats_of(3, 1, 2))
    assert row.input_ids.dtype == row.labels.dtype == torch.int64
    assert row.loss_mask.dtype == torch.float32
    assert row.cu_seqlens.dtype == torch.int32
    assert row.labels.min() >= 0
    assert row.num_tokens == 6


def test_loss_counts_every_assistant_token_but_the_first_of_a_chat() -> None:
    rng = np.random.default_rng(0)
    chats = [chat(list(range(n)), rng.integers(0, 2, n).tolist()) for n in (1, 2, 5, 9)]
    expected = sum(int(c.loss_mask[1:].sum()) for c in chats)
    assert build_row(chats).loss_mask.sum().item() == expected


def test_empty_row() -> None:
    row = build_row([])
    assert row.num_tokens == 0
    assert row.cu_seqlens.tolist() == [0]


@pytest.mark.parametrize("missing", [1, 2, 5])
def test_padding_is_documents_of_one_token_without_loss(missing: int) -> None:
    row = build_row(chats_of(3, 2))
    padded = pad_row(row, 5 + missing, PAD)
    assert padded.num_tokens == 5 + missing
    assert padded.cu_seqlens.tolist() == [0, 3, *range(5, 6 + missing)]
    assert padded.input_ids[5:].tolist() == [PAD] * missing
    assert padded.loss_mask[5:].sum() == 0
    assert torch.equal(padded.labels[:5], row.labels)
    assert torch.equal(padded.loss_mask[:5], row.loss_mask)


def test_padding_a_full_row_changes_nothing_and_a_longer_one_raises() -> None:
    row = build_row(chats_of(3, 2))
    assert pad_row(row, 5, PAD) is row
    with pytest.raises(DataError, match="too long to pad"):
        pad_row(row, 4, PAD)


def test_micro_batch_equals_one_row_of_all_documents() -> None:
    chats = chats_of(3, 1, 4, 2)
    joined = concat_rows([build_row(chats[:2]), build_row(chats[2:3]), build_row(chats[3:])])
    assert_equal_rows(joined, build_row(chats))
    one = build_row(chats)
    assert_equal_rows(concat_rows([one]), one)


def test_micro_batch_of_padded_rows() -> None:
    chats = chats_of(3, 2)
    joined = concat_rows([pad_row(build_row([c]), 4, PAD) for c in chats])
    assert joined.cu_seqlens.tolist() == [0, 3, 4, 6, 7, 8]
    assert documents(joined) == [[100, 101, 102], [PAD], [200, 201], [PAD], [PAD]]


@pytest.mark.parametrize("num_documents", [0, 1, 2, 50, PACKING_WINDOW - 1, PACKING_WINDOW + 1])
@pytest.mark.parametrize("seq_length", [2, 7, 64])
def test_plan_places_every_document_once_within_capacity(
    num_documents: int, seq_length: int
) -> None:
    rng = np.random.default_rng(num_documents)
    lengths = rng.integers(1, seq_length + 1, num_documents).tolist()
    rows = plan_rows(lengths, seq_length)
    assert sorted(d for row in rows for d in row) == list(range(num_documents))
    assert all(1 <= sum(lengths[d] for d in row) <= seq_length for row in rows)
    # A row that is at most half full would have taken the documents of another such row.
    half_empty = [row for row in rows if 2 * sum(lengths[d] for d in row) <= seq_length]
    assert len({row[0] // PACKING_WINDOW for row in half_empty}) == len(half_empty)


def test_plan_finds_the_exact_fit() -> None:
    assert plan_rows([3, 5, 4, 6, 2, 4], 8) == [(0, 1), (2, 5), (3, 4)]
    assert plan_rows([8, 8], 8) == [(0,), (1,)]
    assert plan_rows([1] * 9, 8) == [tuple(range(8)), (8,)]


def test_plan_keeps_windows_apart() -> None:
    rows = plan_rows([1] * (2 * PACKING_WINDOW), 4)
    assert max(max(row) - min(row) for row in rows) == 3
    assert rows == sorted(rows)


def test_dataset_never_splits_a_chat() -> None:
    chats = chats_of(5, 3, 8, 1, 1, 6, 2)
    dataset = PackedDataset(chats, 8)
    found = [document for i in range(len(dataset)) for document in documents(dataset[i])]
    assert sorted(found) == sorted(c.input_ids.tolist() for c in chats)
    assert dataset.num_tokens == 26
    assert dataset.fill == 26 / (8 * len(dataset))
    assert (dataset.num_truncated, dataset.num_skipped) == (0, 0)


def test_dataset_is_a_function_of_its_seed() -> None:
    chats = chats_of(*([3, 5, 2, 7] * 8))

    def tokens(seed: int, shuffle: bool = True) -> list[list[int]]:
        dataset = PackedDataset(chats, 8, shuffle=shuffle, seed=seed)
        return [dataset[i].input_ids.tolist() for i in range(len(dataset))]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(1, shuffle=False) == tokens(2, shuffle=False)


@pytest.mark.parametrize("length", [7, 8])
def test_chat_up_to_the_capacity_fits(length: int) -> None:
    assert len(PackedDataset(chats_of(length), 8)) == 1


def test_too_long_chats_are_all_named() -> None:
    with pytest.raises(DataError) as caught:
        PackedDataset(chats_of(9, 8, 30), 8)
    message = str(caught.value)
    assert "chats that are too long: 2\n" in message
    assert "f:1: 9 tokens, more than seq_length 8" in message
    assert "f:3: 30 tokens" in message
    assert "f:2" not in message
    assert "data.too_long" in message


def test_too_long_chats_are_skipped_and_counted() -> None:
    dataset = PackedDataset(chats_of(9, 8, 30), 8, too_long="skip")
    assert (dataset.num_truncated, dataset.num_skipped) == (0, 2)
    assert documents(dataset[0]) == [list(range(200, 208))]


def test_too_long_chats_are_truncated_and_counted() -> None:
    no_loss_left = chat(list(range(10)), [1] + [0] * 8 + [1])
    dataset = PackedDataset([*chats_of(9, 8), no_loss_left], 8, too_long="truncate")
    assert (dataset.num_truncated, dataset.num_skipped) == (1, 1)
    found = [document for i in range(len(dataset)) for document in documents(dataset[i])]
    assert found == [list(range(100, 108)), list(range(200, 208))]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match="no chat is left"):
        PackedDataset(chats_of(9), 8, too_long="skip")
    with pytest.raises(DataError, match="no chat is left"):
        PackedDataset([], 8)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_rows", "batch"), [(1, 1), (1, 3), (7, 1), (7, 3), (7, 7), (7, 15)])
def test_order_is_a_permutation_in_every_epoch(num_rows: int, batch: int, shuffle: bool) -> None:
    order = BatchOrder(num_rows, batch, seed=5, shuffle=shuffle)
    # num_rows steps make exactly `batch` whole epochs.
    stream = [row for step in range(num_rows) for row in order.rows(step)]
    epochs = [stream[i : i + num_rows] for i in range(0, len(stream), num_rows)]
    assert len(epochs) == batch
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if not shuffle:
        assert all(epoch == list(range(num_rows)) for epoch in epochs)


def test_order_is_pure() -> None:
    forward = [BatchOrder(11, 4, seed=3, shuffle=True).rows(step) for step in range(20)]
    order = BatchOrder(11, 4, seed=3, shuffle=True)
    backward = [order.rows(step) for step in reversed(range(20))][::-1]
    assert forward == backward
    # A resumed run asks for one late step alone.
    assert BatchOrder(11, 4, seed=3, shuffle=True).rows(17) == forward[17]


def test_order_differs_by_epoch_and_seed() -> None:
    order = BatchOrder(50, 50, seed=1, shuffle=True)
    assert order.rows(0) != order.rows(1)
    assert order.rows(0) != BatchOrder(50, 50, seed=2, shuffle=True).rows(0)
    assert order.rows(0) != list(range(50))


def test_order_stays_the_same_across_versions() -> None:
    # A run may resume under another numpy; these numbers must never change.
    assert BatchOrder(8, 8, seed=0, shuffle=True).rows(0) == [7, 4, 5, 1, 6, 2, 0, 3]


def test_order_visits_positions_evenly() -> None:
    first = Counter(BatchOrder(4, 4, seed, shuffle=True).rows(0)[0] for seed in range(400))
    # Binomial(400, 1/4) has mean 100 and deviation 8.7; five deviations are never seen.
    assert all(abs(first[row] - 100) < 44 for row in range(4))


def test_tiny_checkpoint_goes_from_its_recipe_to_rows(tmp_path: Path) -> None:
    from glm5.checkpoint.tiny import write_tiny
    from glm5.config import Glm5Config
    from glm5.train.chat import ChatTokenizer, tokenize_chats
    from glm5.train.data import iter_chats
    from glm5.train.run_config import RunConfig
    from glm5.train.template import load_tokenizer

    folder = write_tiny(tmp_path / "tiny")
    recipe = Path(__file__).parents[2] / "recipes" / "tiny-sft.toml"
    overrides = [f"model.path={folder}", f"data.train={folder}/data/train.jsonl"]
    run = RunConfig.from_toml(recipe, overrides)
    stops = Glm5Config.from_hf(run.model.path).eos_token_id
    tokenizer = ChatTokenizer(load_tokenizer(run.model.path), stops)
    chats = tokenize_chats(iter_chats(run.data.train), tokenizer)
    dataset = PackedDataset(chats, run.data.seq_length, shuffle=True)
    assert dataset.fill > 0.9
    row = dataset[0]
    learnt = tokenizer.tokenizer.decode(row.labels[row.loss_mask == 1].tolist())
    assert learnt.endswith("<|endoftext|>")
    assert "<|user|>" not in learnt
