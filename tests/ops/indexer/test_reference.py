import pytest
import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.indexer.reference import index_scores, index_scores_backward, select_topk
from tests.ops import oracles

TOPK = 4


def _integers(*shape: int) -> Tensor:
    """Small integers: every product and sum is exact, and ties are everywhere."""
    return torch.randint(-2, 3, shape).float()


def _inputs(t_q: int, t_k: int, h: int = 2, d: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return _integers(t_q, h, d), _integers(t_k, d), _integers(t_q, h)


def test_scores_are_the_formula() -> None:
    q, k, weights = torch.randn(5, 3, 8), torch.randn(7, 8), torch.randn(5, 3)
    scores = index_scores(q, k, weights)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, oracles.index_scores(q, k, weights))
    without_relu = (torch.einsum("thd,sd->ths", q, k) * weights[..., None]).sum(1)
    assert not torch.allclose(scores, without_relu)


def test_scores_of_bf16_are_computed_in_fp32() -> None:
    q, k, weights = torch.randn(5, 3, 8).bfloat16(), torch.randn(7, 8).bfloat16(), torch.randn(5, 3)
    expected = oracles.index_scores(q.double(), k.double(), weights.double())
    scores = index_scores(q, k, weights)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(index_scores(q, k, weights), scores)


def test_gradients_of_scores() -> None:
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((4, 2, 3), (5, 3), (4, 2))]
    for x in inputs:
        x.requires_grad_()
    assert torch.autograd.gradcheck(index_scores, inputs)
    grad = torch.randn(4, 5, dtype=torch.float64)
    expected = torch.autograd.grad(index_scores(*inputs), inputs, grad)
    detached = [x.detach() for x in inputs]
    for ours, theirs in zip(index_scores_backward(grad, *detached), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("h", [1, 2, 5])
@pytest.mark.parametrize(
    "lengths",
    [(), (1,), (TOPK - 1,), (TOPK,), (TOPK + 1,), (17,), (1, TOPK + 1, 0, TOPK, 9), (5, 5, 5)],
)
def test_packed_documents_with_ties_everywhere(lengths: tuple[int, ...], h: int) -> None:
    starts, ends = oracles.causal_bounds(*lengths)
    q, k, weights = _inputs(sum(lengths), sum(lengths), h)
    selected = select_topk(q, k, weights, starts, ends, TOPK)
    expected = oracles.select(oracles.index_scores(q, k, weights), starts, ends, TOPK)
    assert selected.dtype == torch.int32
    assert torch.equal(selected, expected)


@pytest.mark.parametrize(("t_q", "t_k"), [(0, 3), (3, 0), (1, 9), (3, 9), (9, 3)])
@pytest.mark.parametrize("topk", [0, 1, 3, 20])
def test_queries_and_keys_of_different_number(t_q: int, t_k: int, topk: int) -> None:
    q, k, weights = _inputs(t_q, t_k)
    edges = torch.randint(0, t_k + 1, (2, t_q)).int()
    starts, ends = edges.amin(0), edges.amax(0)
    selected = select_topk(q, k, weights, starts, ends, topk)
    expected = oracles.select(oracles.index_scores(q, k, weights), starts, ends, topk)
    assert torch.equal(selected, expected)


def test_chunks_change_nothing(request: pytest.FixtureRequest) -> None:
    starts, ends = oracles.causal_bounds(20, 3, 11)
    inputs = _inputs(34, 34)
    whole = select_topk(*inputs, starts, ends, TOPK)
    request.getfixturevalue("tiny_chunks")
    assert torch.equal(select_topk(*inputs, starts, ends, TOPK), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_selection_is_the_best_of_real_scores(dtype: torch.dtype) -> None:
    q, k, weights = (
        torch.randn(30, 3, 8).to(dtype),
        torch.randn(30, 8).to(dtype),
        torch.randn(30, 3),
    )
    starts, ends = oracles.causal_bounds(30)
    expected = oracles.select(index_scores(q, k, weights), starts, ends, TOPK)
    assert torch.equal(select_topk(q, k, weights, starts, ends, TOPK), expected)


def test_nan_scores_are_selected() -> None:
    q, k, weights = _inputs(12, 12)
    k[9] = torch.nan
    starts, ends = oracles.causal_bounds(12)
    selected = select_topk(q, k, weights, starts, ends, TOPK)
    assert (selected[9:] == 9).any(1).all()


def test_no_gradient_and_no_dependence_on_grad_mode() -> None:
    inputs = [x.requires_grad_() for x in _inputs(9, 9)]
    starts, ends = oracles.causal_bounds(9)
    with_grad = select_topk(*inputs, starts, ends, TOPK)
    with torch.no_grad():
        assert torch.equal(select_topk(*inputs, starts, ends, TOPK), with_grad)
    assert not with_grad.requires_grad


@pytest.mark.usefixtures("poisoned_empty")
def test_every_output_is_written() -> None:
    assert torch.empty(2).isnan().all()
    starts, ends = oracles.causal_bounds(3, 6)
    starts[4], ends[4] = 3, 3
    q, k, weights = _inputs(9, 9)
    expected = oracles.select(oracles.index_scores(q, k, weights), starts, ends, TOPK)
    assert torch.equal(select_topk(q, k, weights, starts, ends, TOPK), expected)


def test_wrong_shapes_raise() -> None:
    q, k, weights = _inputs(3, 3)
    starts, ends = oracles.causal_bounds(3)
    good = {"q": q, "k": k, "weights": weights, "starts": starts, "ends": ends, "topk": 2}
    select_topk(**good)
    for change in (
        {"q": q[0]},
        {"k": k[:, :2]},
        {"weights": weights[:2]},
        {"starts": starts[:2]},
        {"starts": starts.float()},
        {"ends": ends.to("meta")},
        {"k": torch.tensor(1.0)},
        {"k": k.to("meta")},
        {"weights": weights.int()},
        {"q": q[:, :0], "weights": weights[:, :0]},
        {"topk": -1},
    ):
        with pytest.raises(BackendError, match="do not fit together"):
            select_topk(**{**good, **change})
