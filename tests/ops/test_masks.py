import pytest
import torch

from glm5.errors import DataError
from glm5.ops.masks import check_cu_seqlens, document_bounds
from tests.ops import oracles


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (4,), (3, 1, 5), (0, 2, 0, 0, 3, 0)])
def test_bounds_of_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    check_cu_seqlens(cu_seqlens, sum(lengths))
    starts, ends = document_bounds(cu_seqlens, sum(lengths))
    expected_starts, expected_ends = oracles.causal_bounds(*lengths)
    assert starts.dtype == ends.dtype == torch.int32
    assert starts.tolist() == expected_starts.tolist()
    assert ends.tolist() == expected_ends.tolist()


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([1, 3]), "first entry is 1"),
        (torch.tensor([0, 4, 3]), "entry 2 is 3, after 4"),
        (torch.tensor([0, -1]), "entry 1 is -1, after 0"),
        (torch.tensor([0, 2]), "last entry is 2, with 3 tokens"),
        (torch.tensor([], dtype=torch.int32), "not a row of integers"),
        (torch.tensor([[0, 3]]), "not a row of integers"),
        (torch.tensor([0.0, 3.0]), "not a row of integers"),
        (torch.tensor(0), "not a row of integers"),
    ],
)
def test_bad_cu_seqlens_raise(cu_seqlens: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_cu_seqlens(cu_seqlens, 3)
