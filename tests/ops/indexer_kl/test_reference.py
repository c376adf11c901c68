import pytest
import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.indexer_kl.reference import indexer_kl, indexer_kl_dense
from glm5.ops.sparse_mla.reference import sparse_mla_with_mass
from tests.ops import oracles

SCALE = 0.4


def _inputs(t_q: int, t_k: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Index q, k and weights (with gradients), then q and kv."""
    shapes = ((t_q, 3, 4), (t_k, 4), (t_q, 3), (t_q, 2, 5), (t_k, 5))
    tensors = [torch.randn(s, dtype=dtype) for s in shapes]
    return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]


def _bounds_mask(starts: Tensor, ends: Tensor, t_k: int) -> Tensor:
    positions = torch.arange(t_k)
    return (positions >= starts[:, None]) & (positions < ends[:, None])


def _selection_mask(topk_indices: Tensor, t_k: int) -> Tensor:
    return torch.stack([torch.isin(torch.arange(t_k), row) for row in topk_indices])


def _lse(inputs: list[Tensor], mask: Tensor) -> Tensor:
    logits = torch.einsum("thd,sd->ths", *inputs[3:]).detach() * SCALE
    return logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)


def _sparse(inputs: list[Tensor], topk_indices: Tensor) -> Tensor:
    """The loss over these keys of what attends to them."""
    *_, mass = sparse_mla_with_mass(*inputs[3:], topk_indices, SCALE, inputs[4].shape[1])
    return indexer_kl(*inputs[:3], topk_indices, mass)


def _oracle(inputs: list[Tensor], mask: Tensor) -> Tensor:
    return oracles.kl(oracles.index_scores(*inputs[:3]), *inputs[3:], mask, SCALE)


def _assert_equal_with_gradients(
    kl: Tensor, expected: Tensor, inputs: list[Tensor], *, retain_graph: bool = False
) -> None:
    torch.testing.assert_close(kl, expected)
    grad = torch.randn_like(kl)
    expected_grads = torch.autograd.grad(expected, inputs[:3], grad, retain_graph=retain_graph)
    for ours, theirs in zip(torch.autograd.grad(kl, inputs[:3], grad), expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("t_q", "t_k", "topk"), [(1, 1, 1), (7, 7, 3), (4, 9, 12), (9, 4, 2)])
def test_sparse_form(t_q: int, t_k: int, topk: int) -> None:
    inputs = _inputs(t_q, t_k)
    indices = oracles.random_selection(t_q, t_k, topk)
    kl = _sparse(inputs, indices)
    assert kl.shape == (t_q,)
    assert kl[0] == 0
    _assert_equal_with_gradients(kl, _oracle(inputs, _selection_mask(indices, t_k)), inputs)


@pytest.mark.parametrize("lengths", [(1,), (5,), (4, 1, 6)])
def test_dense_form(lengths: tuple[int, ...]) -> None:
    t = sum(lengths)
    inputs, (starts, ends) = _inputs(t, t), oracles.causal_bounds(*lengths)
    ends[0] = 0
    mask = _bounds_mask(starts, ends, t)
    kl = indexer_kl_dense(*inputs, _lse(inputs, mask), SCALE, starts, ends)
    _assert_equal_with_gradients(kl, _oracle(inputs, mask), inputs)


def test_gradcheck() -> None:
    inputs, indices = _inputs(4, 6), oracles.random_selection(4, 6, 3)

    def function(*index_inputs: Tensor) -> Tensor:
        return _sparse([*index_inputs, *inputs[3:]], indices)

    assert torch.autograd.gradcheck(function, inputs[:3])


def test_attention_is_a_constant() -> None:
    inputs = [x.detach().requires_grad_() for x in _inputs(5, 5)]
    starts, ends = oracles.causal_bounds(5)
    lse = _lse(inputs, _bounds_mask(starts, ends, 5))
    for kl in (
        indexer_kl_dense(*inputs, lse, SCALE, starts, ends),
        _sparse(inputs, oracles.random_selection(5, 5, 3)),
    ):
        kl.sum().backward()
        assert [x.grad is not None for x in inputs] == [True, True, True, False, False]


def test_the_loss_takes_the_mass_of_any_scale_and_entries_of_any_order() -> None:
    inputs, indices = _inputs(5, 9), oracles.random_selection(5, 9, 4)
    *_, mass = sparse_mla_with_mass(*inputs[3:], indices, SCALE, 5)
    expected = indexer_kl(*inputs[:3], indices, mass)
    for changed in (
        (indices, 7 * mass),
        (indices.flip(1), mass.flip(1)),
        (indices, mass.clone().requires_grad_()),
    ):
        kl = indexer_kl(*inputs[:3], *changed)
        _assert_equal_with_gradients(kl, expected, inputs, retain_graph=True)


def test_zero_only_where_the_distributions_agree() -> None:
    """One head whose index score equals its attention logit, all logits being positive."""
    q, kv = torch.rand(4, 1, 3), torch.rand(4, 3)
    starts, ends = oracles.causal_bounds(4)
    weights = torch.full((4, 1), SCALE)
    lse = _lse([q, kv, weights, q, kv], _bounds_mask(starts, ends, 4))
    agreeing = indexer_kl_dense(q, kv, weights, q, kv, lse, SCALE, starts, ends)
    assert agreeing.abs().max() < 1e-6
    differing = indexer_kl_dense(q, kv, 9 * weights, q, kv, lse, SCALE, starts, ends)
    assert differing[1:].min() > 1e-6


def test_bf16_gradients_keep_their_dtypes() -> None:
    index_q, index_k, weights, q, kv = (x.detach() for x in _inputs(6, 6, torch.float32))
    inputs = [x.bfloat16().requires_grad_() for x in (index_q, index_k)]
    inputs += [weights.requires_grad_(), q.bfloat16(), kv.bfloat16()]
    indices = oracles.random_selection(6, 6, 3)
    kl = _sparse(inputs, indices)
    assert kl.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = _oracle(exact, _selection_mask(indices, 6))
    torch.testing.assert_close(kl.double(), expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(kl.sum(), inputs[:3])
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.usefixtures("poisoned_empty", "tiny_chunks")
def test_chunks_of_one_row() -> None:
    inputs, indices = _inputs(9, 9), oracles.random_selection(9, 9, 4)
    kl = _sparse(inputs, indices)
    _assert_equal_with_gradients(kl, _oracle(inputs, _selection_mask(indices, 9)), inputs)


@pytest.mark.parametrize(("t_q", "t_k"), [(0, 0), (0, 3), (3, 0)])
def test_no_queries_or_no_keys(t_q: int, t_k: int) -> None:
    inputs = _inputs(t_q, t_k)
    indices = torch.full((t_q, 2), -1, dtype=torch.int32)
    kl = indexer_kl(*inputs[:3], indices, torch.zeros(t_q, 2))
    assert (kl == 0).all()
    for x, grad in zip(inputs, torch.autograd.grad(kl.sum(), inputs[:3]), strict=False):
        assert torch.equal(grad, torch.zeros_like(x))


def test_wrong_inputs_raise() -> None:
    inputs, (starts, ends) = _inputs(3, 3), oracles.causal_bounds(3)
    indices, mass = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1)
    short = [*inputs[:1], inputs[1][:, :2], *inputs[2:]]
    for index, keys in (
        (inputs, (indices[:2], mass)),
        (inputs, (indices, mass[:, :0])),
        (short, (indices, mass)),
        (inputs, (indices.float(), mass)),
        (inputs, (indices, mass.to("meta"))),
        (inputs, (indices, mass.int())),
        ([inputs[0], torch.tensor(1.0), inputs[2]], (indices, mass)),
        ([inputs[0][:, :0], inputs[1], inputs[2][:, :0]], (indices, mass)),
    ):
        with pytest.raises(BackendError, match="indexer_kl do not fit together"):
            indexer_kl(*index[:3], *keys)
    for tensors, lse, bounds in (
        (inputs, torch.zeros(3, 2), (starts[:2], ends[:2])),
        (inputs, torch.zeros(3, 1), (starts, ends)),
        (short, torch.zeros(3, 2), (starts, ends)),
        (inputs, torch.zeros(3, 2), (starts.float(), ends)),
        (inputs, torch.zeros(3, 2, device="meta"), (starts, ends)),
        ([*inputs[:3], inputs[3][:, :0], inputs[4]], torch.zeros(3, 0), (starts, ends)),
    ):
        with pytest.raises(BackendError, match="indexer_kl_dense do not fit together"):
            indexer_kl_dense(*tensors, lse, SCALE, *bounds)
    with pytest.raises(BackendError, match="do not exist"):
        indexer_kl(*inputs[:3], indices + 3, mass)
