"""Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py switches on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from glm5.errors import BackendError
from glm5.ops.indexer import triton_select, triton_topk
from glm5.ops.indexer.selection import select_from_scores
from glm5.ops.indexer.triton_select import select_topk
from glm5.ops.indexer.triton_topk import select_rows
from tests.ops import oracles
from tests.ops.random_shapes import random_shapes

# The interpreter's time goes with the size of the tiles.
CAPACITY = 4096 if torch.cuda.is_available() else 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOPK = 4
INF, NAN = torch.inf, torch.nan


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_topk, "_MIN_CAPACITY", CAPACITY)


def _integers(*shape: int) -> Tensor:
    """Small integers: every product and sum is exact, and ties are everywhere."""
    return torch.randint(-2, 3, shape).float()


def _inputs(t_q: int, t_k: int, h: int = 2, d: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return _integers(t_q, h, d), _integers(t_k, d), _integers(t_q, h)


def _select(*inputs: Tensor, topk: int) -> Tensor:
    return select_topk(*(x.to(DEVICE) for x in inputs), topk).cpu()


def _expected(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    return select_from_scores(oracles.index_scores(q, k, weights), starts, ends, topk)


def _select_scores(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    # Rows are aligned, and what lies outside the bounds is never looked at.
    padded = torch.full((len(scores), -(-scores.shape[1] // 4) * 4 + 4), NAN)
    padded[:, : scores.shape[1]] = scores
    topk_indices = torch.full((len(scores), topk), -7, dtype=torch.int32, device=DEVICE)
    bounds = (x.int().to(DEVICE) for x in (starts, ends))
    select_rows(padded.to(DEVICE), scores.shape[1], *bounds, topk_indices)
    return topk_indices.cpu()


@pytest.mark.parametrize(("h", "d"), [(1, 1), (2, 3), (5, 20), (33, 4)])
@pytest.mark.parametrize(
    "lengths",
    [(), (1,), (TOPK - 1,), (TOPK,), (TOPK + 1,), (37,), (1, TOPK + 1, 0, TOPK, 9)],
)
def test_packed_documents_with_ties_everywhere(lengths: tuple[int, ...], h: int, d: int) -> None:
    inputs = (*_inputs(sum(lengths), sum(lengths), h, d), *oracles.causal_bounds(*lengths))
    selected = _select(*inputs, topk=TOPK)
    assert selected.dtype == torch.int32
    assert torch.equal(selected, _expected(*inputs, TOPK))


@pytest.mark.parametrize(("t_q", "t_k"), [(0, 3), (3, 0), (1, 9), (3, 90), (9, 3)])
@pytest.mark.parametrize("topk", [0, 1, 3, 20])
def test_queries_and_keys_of_different_number(t_q: int, t_k: int, topk: int) -> None:
    edges = torch.randint(0, t_k + 1, (2, t_q)).int()
    inputs = (*_inputs(t_q, t_k), edges.amin(0), edges.amax(0))
    assert torch.equal(_select(*inputs, topk=topk), _expected(*inputs, topk))


def test_heads_wider_than_a_tile() -> None:
    inputs = (*_inputs(9, 9, 2, 130), *oracles.causal_bounds(9))
    assert torch.equal(_select(*inputs, topk=TOPK), _expected(*inputs, TOPK))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (*_inputs(34, 34), *oracles.causal_bounds(20, 3, 11))
    whole = _select(*inputs, topk=TOPK)
    for num_rows in (1, 5):
        monkeypatch.setattr(triton_select, "_SCORE_BYTES", num_rows * 4 * 128)
        assert torch.equal(_select(*inputs, topk=TOPK), whole)


def test_bounds_are_cut_to_the_keys() -> None:
    inputs = _inputs(4, 9)
    wide = torch.tensor([-3, 2, -1, 9]), torch.tensor([20, 99, 0, 10])
    cut = torch.tensor([0, 2, 0, 9]), torch.tensor([9, 9, 0, 9])
    assert torch.equal(_select(*inputs, *wide, topk=TOPK), _expected(*inputs, *cut, TOPK))


def test_nan_scores_are_selected() -> None:
    q, k, weights = _inputs(12, 12)
    k[9] = NAN
    selected = _select(q, k, weights, *oracles.causal_bounds(12), topk=TOPK)
    assert (selected[9:] == 9).any(1).all()
    assert not (selected[:9] == 9).any()


def test_no_gradient_and_no_dependence_on_grad_mode() -> None:
    inputs = (*(x.requires_grad_() for x in _inputs(9, 9)), *oracles.causal_bounds(9))
    with_grad = _select(*inputs, topk=TOPK)
    with torch.no_grad():
        assert torch.equal(_select(*inputs, topk=TOPK), with_grad)
    assert not with_grad.requires_grad


@pytest.mark.usefixtures("poisoned_empty")
def test_every_output_is_written_and_no_other_score_is_read() -> None:
    starts, ends = oracles.causal_bounds(3, 60)
    starts[4], ends[4] = 3, 3
    inputs = (*_inputs(63, 63), starts, ends)
    assert torch.equal(_select(*inputs, topk=TOPK), _expected(*inputs, TOPK))


def test_wrong_inputs_raise() -> None:
    q, k, weights = _inputs(3, 3)
    bounds = oracles.causal_bounds(3)
    with pytest.raises(BackendError, match="do not fit together"):
        select_topk(q, k[:, :2], weights, *bounds, 2)
    with pytest.raises(BackendError, match="dtype"):
        select_topk(q.double(), k.double(), weights, *bounds, 2)
    with pytest.raises(BackendError, match="dtype"):
        select_topk(q, k.bfloat16(), weights, *bounds, 2)


@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize(
    "scores",
    [
        [1, 1, 1, 1],
        [0, 2, 1, 2, 1],
        [-0.0, 0.0, -0.0, 0.0],
        [0.0, -0.0, 1.0, -1.0],
        [-3, -1, -2, -1],
        [-INF, -INF, -INF, -INF],
        [-INF, INF, INF, INF],
        [INF, 5, NAN, 7],
        [1, -NAN, NAN, NAN],
        [NAN, NAN, NAN, NAN],
        [-INF, NAN, 0, 1e-45, -1e-45],
        [3e38, -3e38, 3e38, INF],
    ],
)
def test_ties_signed_zero_infinity_and_nan(scores: list[float], topk: int) -> None:
    inputs = torch.tensor([scores]), torch.tensor([0]), torch.tensor([len(scores)]), topk
    assert torch.equal(_select_scores(*inputs), select_from_scores(*inputs))


def _score_rows(num_keys: int) -> Tensor:
    """Rows that are hard to search: smooth, tied at the threshold, extreme, and full of NaN."""
    smooth = torch.randn(num_keys)
    return torch.stack(
        [
            smooth,
            smooth.relu(),
            smooth.round(),
            (smooth * 40).exp(),
            torch.where(smooth > 1, NAN, smooth),
            torch.where(smooth > 0, INF, -INF),
            torch.arange(num_keys) * 1e-45,
            torch.ones(num_keys),
        ]
    )


def _use_capacity(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    monkeypatch.setattr(triton_topk, "_MIN_CAPACITY", capacity)
    monkeypatch.setattr(triton_topk, "_MAX_CAPACITY", capacity)


@pytest.mark.parametrize("capacity", [128, 256])
@pytest.mark.parametrize("topk", [1, 64, 127])
def test_hard_rows(topk: int, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_capacity(monkeypatch, capacity)
    scores = _score_rows(200)
    starts = torch.arange(len(scores))
    for num_valid in (topk - 1, topk, topk + 1, 200):
        inputs = scores, starts, (starts + num_valid).clamp(max=200), topk
        assert torch.equal(_select_scores(*inputs), select_from_scores(*inputs))


def test_more_keys_than_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    _use_capacity(monkeypatch, 32)
    scores = _score_rows(100)[:5]
    starts = torch.arange(len(scores))
    inputs = scores, starts, torch.full((len(scores),), 100), 63
    assert torch.equal(_select_scores(*inputs), select_from_scores(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [4095, 8193, 32768, 40000])
def test_long_rows(num_keys: int) -> None:
    scores = _score_rows(num_keys)
    starts = torch.tensor([0, 1, 2, 3, 0, 0, 0, 5])
    inputs = scores, starts, torch.full((len(scores),), num_keys), 2048
    assert torch.equal(_select_scores(*inputs), select_from_scores(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("h", "d"), [(32, 128), (64, 128), (1, 16), (7, 100), (4, 200)])
def test_bf16_on_the_gpu(h: int, d: int) -> None:
    inputs = (*_inputs(400, 400, h, d), *oracles.causal_bounds(250, 1, 149))
    expected = _expected(*inputs, 64)
    q, k, *others = inputs
    assert torch.equal(_select(q.bfloat16(), k.bfloat16(), *others, topk=64), expected)


@random_shapes(50)
@given(data=st.data())
def test_random_shapes(data: st.DataObject, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("poisoned_empty")
    t_q, t_k = data.draw(st.integers(0, 12), "t_q"), data.draw(st.integers(0, 100), "t_k")
    h, d = data.draw(st.integers(1, 17), "h"), data.draw(st.integers(1, 20), "d")
    topk = data.draw(st.integers(0, 80), "topk")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    edges = torch.randint(0, t_k + 1, (2, t_q)).int()
    inputs = (*_inputs(t_q, t_k, h, d), edges.amin(0), edges.amax(0))
    assert torch.equal(_select(*inputs, topk=topk), _expected(*inputs, topk))
