"""Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py switches on."""

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.sparse_mla import reference, row_lengths
from glm5.ops.sparse_mla.autograd import sparse_mla
from tests.ops import oracles

SCALE = 0.3


def _run(function, q: Tensor, kv: Tensor, indices: Tensor, d_v: int, grad: Tensor):
    """Output, log-sum-exp and the gradients in q and kv."""
    q, kv = (x.detach().clone().requires_grad_() for x in (q, kv))
    out, lse = function(q, kv, indices, SCALE, d_v)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, kv), grad.to(out.dtype))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("t_q", "t_k", "h", "d_qk", "d_v", "topk"),
    [
        (2, 1, 1, 1, 1, 1),
        (4, 9, 3, 6, 6, 20),
        (5, 9, 17, 20, 17, 5),
        (3, 80, 33, 24, 16, 65),
        (0, 4, 2, 5, 4, 2),
        (3, 4, 2, 5, 4, 0),
    ],
)
def test_fp32_equals_the_reference(
    t_q: int, t_k: int, h: int, d_qk: int, d_v: int, topk: int
) -> None:
    q, kv = torch.randn(t_q, h, d_qk), torch.randn(t_k, d_qk)
    indices, grad = oracles.random_selection(t_q, t_k, topk), torch.randn(t_q, h, d_v)
    expected = _run(reference.sparse_mla, q, kv, indices, d_v, grad)
    results = _run(sparse_mla, q, kv, indices, d_v, grad)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_keys_at_all() -> None:
    indices = torch.full((2, 3), -1, dtype=torch.int32)
    q, kv, grad = torch.randn(2, 2, 5), torch.randn(0, 5), torch.randn(2, 2, 4)
    out, lse, grad_q, grad_kv = _run(sparse_mla, q, kv, indices, 4, grad)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (grad_q == 0).all()
    assert grad_kv.shape == (0, 5)


def test_rows_stop_at_their_last_key() -> None:
    indices = torch.full((4, 40), -1, dtype=torch.int32)
    indices[1, 0] = 7
    indices[2, :40] = torch.arange(40)
    indices[3, 33] = 0
    assert row_lengths.row_lengths(indices).tolist() == [0, 1, 40, 34]


def test_dtypes_that_the_kernels_do_not_know_are_refused() -> None:
    q, kv = torch.randn(2, 1, 4).double(), torch.randn(3, 4).double()
    with pytest.raises(BackendError, match="dtype"):
        sparse_mla(q, kv, torch.zeros(2, 1, dtype=torch.int32), SCALE, 4)


def _selection_with_lengths(lengths: list[int], t_k: int, topk: int) -> Tensor:
    indices = torch.full((len(lengths), topk), -1, dtype=torch.int32)
    for i, length in enumerate(lengths):
        indices[i, :length] = torch.randperm(t_k)[:length].sort().values.int()
    return indices


@pytest.mark.gpu
@pytest.mark.parametrize("h", [1, 8, 63, 64, 65, 128])
@pytest.mark.parametrize(("d_qk", "d_v"), [(576, 512), (80, 64)])
def test_bf16_error_is_at_most_twice_that_of_plain_pytorch(h: int, d_qk: int, d_v: int) -> None:
    lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129, 300]
    q, kv = torch.randn(len(lengths), h, d_qk).bfloat16(), torch.randn(400, d_qk).bfloat16()
    grad = torch.randn(len(lengths), h, d_v).bfloat16()
    indices = _selection_with_lengths(lengths, 400, 300)
    exact = _run(oracles.attention, q.double(), kv.double(), indices, d_v, grad)
    naive = _run(oracles.attention, q, kv, indices, d_v, grad)
    torch.full((2**26,), torch.nan, device="cuda")  # left behind for the outputs to be written in
    results = _run(sparse_mla, q.cuda(), kv.cuda(), indices.cuda(), d_v, grad.cuda())
    ours = [x.cpu() for x in results]
    for mine, theirs, true in zip(ours, naive, exact, strict=True):
        finite = true.isfinite()
        assert torch.equal(mine.isfinite(), finite)
        rounding = torch.finfo(torch.bfloat16).eps * true[finite].abs().max()
        my_error, their_error = ((x.double() - true)[finite].abs().max() for x in (mine, theirs))
        assert my_error <= 2 * their_error + rounding
