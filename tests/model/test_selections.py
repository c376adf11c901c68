"""Packed selections come back as they were, whatever their form and whichever rows are asked."""

import pytest
import torch
from torch import Tensor

from glm5.model.selections import DocumentSelection, LayerSelections, PackedSelection
from glm5.ops import key_sets
from glm5.ops.masks import document_bounds

CPU, TOPK = torch.device("cpu"), 3
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
# The second selects; so would the last token of the fifth, had it a record.
LENGTHS = (1, 11, 2, TOPK, TOPK + 1, 1)


def drawn_keys(length: int, seed: int) -> Tensor:
    """Of the queries TOPK, ..., length - 1 of a document: [n, TOPK] ascending."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(query + 1, generator=generator) for query in range(TOPK, length)]
    return torch.stack([row[:TOPK].sort().values for row in rows]).to(torch.int32)


def bitmap(keys: Tensor, num_keys: int) -> Tensor:
    """Written out bit by bit."""
    rows = torch.zeros(len(keys), -(-num_keys // 8), dtype=torch.uint8)
    for row, some in zip(rows, keys.tolist(), strict=True):
        for key in some:
            row[key // 8] += 1 << key % 8
    return rows


def packed(keys: Tensor, form: torch.dtype, num_keys: int) -> PackedSelection:
    rows = bitmap(keys, num_keys) if form == torch.uint8 else keys.to(form)
    return PackedSelection(rows, TOPK)


FORMS = [torch.uint8, torch.uint16, torch.int32]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@every_form
@pytest.mark.parametrize("chunk_bytes", [1, 2000, 2**26])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_rows_are_decoded(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, form: torch.dtype, chunk_bytes: int
) -> None:
    monkeypatch.setattr(key_sets, "CHUNK_BYTES", chunk_bytes)
    keys = drawn_keys(40, 0)
    selection = packed(keys, form, 40)
    for some in (range(37), range(5, 5), range(36, 37), range(2, 31, 4)):
        got = selection.decode(some, device)
        assert got.dtype == torch.int32 and got.device.type == device.type
        assert torch.equal(got.cpu(), keys[some.start : some.stop : some.step])
    assert selection.num_bytes == {1: 37 * 5, 2: 37 * 6, 4: 37 * 12}[form.itemsize]


def test_keys_beyond_int16_keep_their_sign() -> None:
    keys = torch.tensor([[0, 40_000, 65_535]])
    assert packed(keys, torch.uint16, 0).decode(range(1), CPU).tolist() == keys.tolist()


def expected_rows(selected: dict[int, Tensor]) -> Tensor:
    """One row at a time; the last query of a selecting document has no record."""
    rows, start = [], 0
    for document, length in enumerate(LENGTHS):
        for query in range(length):
            if query < TOPK:
                keys = list(range(start, start + query + 1))
            elif query == length - 1:
                keys = []
            else:
                keys = [start + int(key) for key in selected[document][query - TOPK]]
            rows.append(keys + [-1] * (TOPK - len(keys)))
        start += length
    return torch.tensor(rows, dtype=torch.int32)


@every_form
def test_rows_of_a_pack(form: torch.dtype) -> None:
    selected = drawn_keys(10, 1)
    starts_of = torch.tensor([0, *LENGTHS]).cumsum(0)
    selection = packed(selected, form, 10)
    documents = [DocumentSelection(int(starts_of[1]), selection)]
    # of a document of TOPK + 1 tokens no query that selects has a record
    nothing = PackedSelection(selection.rows[:0], TOPK)
    documents.append(DocumentSelection(int(starts_of[4]), nothing))
    layer = LayerSelections(TOPK, tuple(documents))
    expected = expected_rows({1: selected})
    num_tokens = sum(LENGTHS)
    starts, ends = document_bounds(starts_of, num_tokens)
    shares = [range(num_tokens), range(0, 11), range(11, num_tokens), range(4, 4)]
    shares += [range(rank, num_tokens, 2) for rank in range(2)]
    shares += [range(6 + rank, 17, 4) for rank in range(4)]
    for queries in shares:
        some = slice(queries.start, queries.stop, queries.step)
        got = layer.rows(queries, starts[some], ends[some])
        assert torch.equal(got, expected[some]), queries


def test_recorded_rows_alone() -> None:
    keys = drawn_keys(10, 1)
    layer = LayerSelections(TOPK, (DocumentSelection(5, packed(keys, torch.uint8, 10)),))
    # the rows of the queries 5 + 3 to 5 + 9
    found = list(layer.recorded(range(1, 30, 2), CPU))
    assert [places for places, _ in found] == [slice(4, 7)]
    assert torch.equal(found[0][1], keys[1:7:2] + 5)
    assert list(layer.recorded(range(8), CPU)) == []
    assert list(layer.recorded(range(15, 30), CPU)) == []
