import pytest
import torch

from glm5.errors import BackendError
from glm5.ops.key_sets import Chunk, KeyBounds, KeySelection, rows_per_chunk
from tests.ops import oracles


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_chunks_span_the_keys_of_their_rows() -> None:
    bounds = KeyBounds(*oracles.causal_bounds(3, 2))
    assert bounds.chunks(5, 2) == [
        Chunk(slice(0, 2), slice(0, 2)),
        Chunk(slice(2, 4), slice(0, 4)),
        Chunk(slice(4, 5), slice(3, 5)),
    ]


def test_empty_rows_do_not_widen_a_chunk_and_empty_chunks_vanish() -> None:
    bounds = KeyBounds(_ints(9, 2, 0, 7), _ints(0, 4, 0, 7))
    assert bounds.chunks(5, 2) == [Chunk(slice(0, 2), slice(2, 4))]
    selection = KeySelection(torch.tensor([[-1, -1], [2, 3], [-1, -1], [-1, -1]]).int())
    assert selection.chunks(5, 2) == [Chunk(slice(0, 2), slice(2, 4))]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 100])
def test_masks_of_chunks_make_up_the_whole_mask(num_rows: int) -> None:
    topk_indices = oracles.random_selection(7, 9, 4)
    expected = torch.zeros(7, 9, dtype=torch.bool)
    for row, indices in enumerate(topk_indices.tolist()):
        expected[row, [j for j in indices if j >= 0]] = True
    selection = KeySelection(topk_indices)
    mask = torch.zeros_like(expected)
    for chunk in selection.chunks(9, num_rows):
        mask[chunk.rows, chunk.keys] = selection.mask(chunk)
    assert torch.equal(mask, expected)


def test_no_rows_and_no_columns() -> None:
    assert KeyBounds(_ints(), _ints()).chunks(3, 2) == []
    assert KeySelection(torch.zeros(0, 4, dtype=torch.int32)).chunks(3, 2) == []
    assert KeySelection(torch.zeros(4, 0, dtype=torch.int32)).chunks(3, 2) == []


@pytest.mark.parametrize(("start", "end"), [(0, 4), (-1, 2)])
def test_keys_that_do_not_exist_raise(start: int, end: int) -> None:
    with pytest.raises(BackendError, match="do not exist"):
        KeyBounds(_ints(0, start), _ints(1, end)).chunks(3, 1)


def test_an_index_beyond_the_keys_raises() -> None:
    with pytest.raises(BackendError, match=r"keys \[1, 4\) in rows from 0 on"):
        KeySelection(torch.tensor([[1, 3]]).int()).chunks(3, 8)


def test_at_least_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.ops.key_sets.CHUNK_BYTES", 100)
    assert [rows_per_chunk(n) for n in (0, 1, 30, 100, 101)] == [100, 100, 3, 1, 1]
