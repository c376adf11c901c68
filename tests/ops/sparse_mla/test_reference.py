import pytest
import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.sparse_mla.reference import sparse_mla
from tests.ops import oracles

SCALE = 0.3


def _with_grad(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def _run(function, q: Tensor, kv: Tensor, indices: Tensor, d_v: int, grad: Tensor):
    """Output, log-sum-exp and the gradients in q and kv."""
    q, kv = _with_grad(q, kv)
    out, lse = function(q, kv, indices, SCALE, d_v)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, kv), grad.to(out.dtype))


@pytest.mark.parametrize(
    ("t_q", "t_k", "h", "d_qk", "d_v", "topk"),
    [
        (1, 1, 1, 1, 1, 1),
        (5, 5, 2, 6, 4, 3),
        (4, 9, 3, 6, 6, 20),
        (9, 4, 5, 5, 3, 4),
        (33, 33, 4, 6, 4, 7),
    ],
)
def test_against_a_dense_softmax(
    t_q: int, t_k: int, h: int, d_qk: int, d_v: int, topk: int
) -> None:
    q, kv = torch.randn(t_q, h, d_qk).double(), torch.randn(t_k, d_qk).double()
    indices, grad = oracles.random_selection(t_q, t_k, topk), torch.randn(t_q, h, d_v)
    expected = _run(oracles.attention, q, kv, indices, d_v, grad)
    for ours, theirs in zip(_run(sparse_mla, q, kv, indices, d_v, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    single = _run(sparse_mla, q.float(), kv.float(), indices, d_v, grad)
    for ours, theirs in zip(single, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_gradcheck() -> None:
    q, kv = _with_grad(torch.randn(4, 2, 5).double(), torch.randn(6, 5).double())
    indices = oracles.random_selection(4, 6, 3)
    assert torch.autograd.gradcheck(lambda q, kv: sparse_mla(q, kv, indices, SCALE, 3)[0], (q, kv))


def test_bf16_error_is_at_most_twice_that_of_plain_pytorch() -> None:
    q, kv = torch.randn(64, 4, 24).bfloat16(), torch.randn(64, 24).bfloat16()
    indices, grad = oracles.random_selection(64, 64, 16), torch.randn(64, 4, 16).bfloat16()
    exact = _run(oracles.attention, q.double(), kv.double(), indices, 16, grad)
    naive = _run(oracles.attention, q, kv, indices, 16, grad)
    ours = _run(sparse_mla, q, kv, indices, 16, grad)
    assert [x.dtype for x in ours] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 2
    for mine, theirs, true in zip(ours, naive, exact, strict=True):
        finite = true.isfinite()
        rounding = torch.finfo(torch.bfloat16).eps * true[finite].abs().max()
        my_error, their_error = ((x.double() - true)[finite].abs().max() for x in (mine, theirs))
        assert my_error <= 2 * their_error + rounding


def test_accumulation_of_kv_gradients_is_not_done_in_bf16() -> None:
    """300 equal queries add 1 each to one value: bf16 sums would stop at 256."""
    q, kv = _with_grad(torch.zeros(300, 1, 2).bfloat16(), torch.zeros(1, 2).bfloat16())
    out, _ = sparse_mla(q, kv, torch.zeros(300, 1, dtype=torch.int32), SCALE, 2)
    out.sum().backward()
    assert kv.grad is not None
    assert kv.grad.tolist() == [[300.0, 300.0]]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("topk", [0, 3])
def test_rows_without_keys_give_zero(topk: int) -> None:
    assert torch.empty(2).isnan().all()
    indices = torch.full((3, topk), -1, dtype=torch.int32)
    grad = torch.randn(3, 2, 4)
    q, kv = torch.randn(3, 2, 5), torch.randn(6, 5)
    out, lse, grad_q, grad_kv = _run(sparse_mla, q, kv, indices, 4, grad)
    assert (lse == -torch.inf).all()
    for x in (out, grad_q, grad_kv):
        assert (x == 0).all()


@pytest.mark.usefixtures("poisoned_empty")
def test_empty_rows_between_others() -> None:
    indices = torch.tensor([[0, 2], [-1, -1], [1, -1]], dtype=torch.int32)
    q, kv, grad = torch.randn(3, 2, 5), torch.randn(3, 5), torch.randn(3, 2, 4)
    results = _run(sparse_mla, q, kv, indices, 4, grad)
    expected = _run(oracles.attention, q, kv, indices, 4, grad)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype))
    assert (results[0][1] == 0).all()


@pytest.mark.parametrize(("t_q", "t_k"), [(0, 0), (0, 4), (4, 0)])
def test_no_queries_or_no_keys(t_q: int, t_k: int) -> None:
    indices = torch.full((t_q, 2), -1, dtype=torch.int32)
    q, kv, grad = torch.randn(t_q, 2, 5), torch.randn(t_k, 5), torch.randn(t_q, 2, 4)
    out, lse, grad_q, grad_kv = _run(sparse_mla, q, kv, indices, 4, grad)
    assert out.shape == (t_q, 2, 4)
    assert lse.shape == (t_q, 2)
    assert (grad_q.shape, grad_kv.shape) == (q.shape, kv.shape)
    assert (out == 0).all()


def test_chunks_change_only_rounding(request: pytest.FixtureRequest) -> None:
    q, kv, grad = torch.randn(20, 2, 5), torch.randn(20, 5), torch.randn(20, 2, 4)
    indices = oracles.random_selection(20, 20, 6)
    whole = _run(sparse_mla, q, kv, indices, 4, grad)
    request.getfixturevalue("tiny_chunks")
    for ours, theirs in zip(_run(sparse_mla, q, kv, indices, 4, grad), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_same_bits_every_time_in_every_mode() -> None:
    q, kv, grad = torch.randn(20, 2, 5), torch.randn(20, 5), torch.randn(20, 2, 4)
    indices = oracles.random_selection(20, 20, 6)
    first = _run(sparse_mla, q, kv, indices, 4, grad)
    second = _run(sparse_mla, q, kv, indices, 4, grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        third = _run(sparse_mla, q, kv, indices, 4, grad)
    for results in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
    with torch.no_grad():
        assert torch.equal(sparse_mla(q, kv, indices, SCALE, 4)[0], first[0])


def test_other_documents_do_not_matter() -> None:
    starts, ends = oracles.causal_bounds(6, 5)
    indices = torch.stack([torch.arange(6).int() + s for s in starts])
    indices[indices >= ends[:, None]] = -1
    q, kv = torch.randn(11, 2, 5), torch.randn(11, 5)
    out, _ = sparse_mla(q, kv, indices, SCALE, 4)
    kv[6:] = 1e4
    changed, _ = sparse_mla(q, kv, indices, SCALE, 4)
    assert torch.equal(changed[:6], out[:6])
    assert not torch.allclose(changed[6:], out[6:])


def test_expanded_gradients_and_order_of_indices() -> None:
    q, kv = _with_grad(torch.randn(3, 2, 5), torch.randn(6, 5))
    indices = torch.tensor([[0, 2, 5], [1, 3, -1], [4, -1, -1]], dtype=torch.int32)
    sparse_mla(q, kv, indices, SCALE, 4)[0].sum().backward()
    q_again, kv_again = _with_grad(q, kv)
    sparse_mla(q_again, kv_again, indices.flip(1), SCALE, 4)[0].sum().backward()
    assert torch.equal(q.grad, q_again.grad)
    assert torch.equal(kv.grad, kv_again.grad)


def test_lse_carries_no_gradient() -> None:
    q, kv = _with_grad(torch.randn(3, 2, 5), torch.randn(6, 5))
    out, lse = sparse_mla(q, kv, oracles.random_selection(3, 6, 2), SCALE, 4)
    assert out.requires_grad
    assert not lse.requires_grad


def test_wrong_inputs_raise() -> None:
    good = {
        "q": torch.randn(3, 2, 5),
        "kv": torch.randn(6, 5),
        "topk_indices": torch.zeros(3, 1, dtype=torch.int32),
        "softmax_scale": SCALE,
        "d_v": 4,
    }
    sparse_mla(**good)
    for change in (
        {"q": torch.randn(2, 5)},
        {"kv": torch.randn(6, 4)},
        {"kv": torch.randn(6, 5).double()},
        {"topk_indices": torch.zeros(3, 1, dtype=torch.int64)},
        {"topk_indices": torch.zeros(2, 1, dtype=torch.int32)},
        {"topk_indices": torch.zeros(3, 1, dtype=torch.int32, device="meta")},
        {"q": good["q"].int(), "kv": good["kv"].int()},
        {"q": torch.randn(3, 0, 5)},
        {"q": torch.tensor(1.0)},
        {"kv": torch.tensor(1.0)},
        {"kv": torch.randn(6, 5, device="meta")},
        {"d_v": 0},
        {"d_v": 6},
    ):
        with pytest.raises(BackendError, match="do not fit together"):
            sparse_mla(**{**good, **change})
    with pytest.raises(BackendError, match="do not exist"):
        sparse_mla(**{**good, "topk_indices": torch.full((3, 1), 6, dtype=torch.int32)})
