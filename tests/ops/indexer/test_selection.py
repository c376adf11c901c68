import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.ops.indexer.selection import select_from_scores
from tests.ops import oracles

INF, NAN = math.inf, math.nan


def _select(scores: list[float], topk: int, dtype: torch.dtype = torch.float32) -> list[int]:
    starts, ends = torch.tensor([0]), torch.tensor([len(scores)])
    return select_from_scores(torch.tensor([scores], dtype=dtype), starts, ends, topk)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 1, 1, 1], [0, 1]),
        ([0, 2, 1, 2, 1], [1, 3]),
        ([0, 1, 2, 1], [1, 2]),
        ([-0.0, 0.0, -0.0], [0, 1]),
        ([-0.0, 0.0, 0.0], [0, 1]),
        ([0.0, -0.0, 1.0], [0, 2]),
        ([-3, -1, -2, -1], [1, 3]),
        ([-INF, -INF, -INF], [0, 1]),
        ([-INF, INF, INF, INF], [1, 2]),
        ([INF, 5, NAN, 7], [0, 2]),
        ([1, -NAN, NAN, NAN], [1, 2]),
        ([-INF, NAN], [0, 1]),
        ([4], [0, -1]),
        ([], [-1, -1]),
    ],
)
def test_ties_signed_zero_infinity_and_nan(
    scores: list[float], expected: list[int], dtype: torch.dtype
) -> None:
    assert _select(scores, 2, dtype) == expected


def test_close_but_different_scores_are_not_ties() -> None:
    one = torch.tensor(1.0)
    above = torch.nextafter(one, torch.tensor(2.0)).item()
    assert _select([1.0, above], 1) == [1]
    tiny = 1e-45
    assert _select([0.0, -tiny, tiny], 1) == [2]


@pytest.mark.parametrize("topk", [0, 1, 3, 4, 5, 9])
def test_bounds_hide_the_best_scores(topk: int) -> None:
    scores = torch.tensor([[9.0, 1, 2, 1, 9]]).repeat(5, 1)
    starts = torch.tensor([0, 1, 1, 3, 4], dtype=torch.int32)
    ends = torch.tensor([5, 4, 1, 2, 5], dtype=torch.int32)
    expected = oracles.select(scores, starts, ends, topk)
    selected = select_from_scores(scores, starts, ends, topk)
    assert selected.dtype == torch.int32
    assert torch.equal(selected, expected)


FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_scores(data: st.DataObject) -> None:
    t_q, t_k = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 7))
    topk = data.draw(st.integers(0, 9))
    values = data.draw(st.lists(FLOATS, min_size=t_q * t_k, max_size=t_q * t_k))
    edges = data.draw(st.lists(st.integers(0, t_k), min_size=2 * t_q, max_size=2 * t_q))
    scores = torch.tensor(values, dtype=torch.float32).view(t_q, t_k)
    starts, ends = torch.tensor(edges, dtype=torch.int32).view(2, t_q)
    selected = select_from_scores(scores, starts, ends, topk)
    assert torch.equal(selected, oracles.select(scores, starts, ends, topk))
