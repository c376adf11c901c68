"""Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py switches on."""

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.sparse_mla import reference, repeatable, row_lengths, selection
from glm5.ops.sparse_mla.autograd import sparse_mla
from glm5.ops.sparse_mla.key_lists import key_lists
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
    for deterministic in (False, True):
        function = partial(sparse_mla, deterministic=deterministic)
        results = _run(function, q, kv, indices, d_v, grad)
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_keys_at_all(deterministic: bool) -> None:
    indices = torch.full((2, 3), -1, dtype=torch.int32)
    q, kv, grad = torch.randn(2, 2, 5), torch.randn(0, 5), torch.randn(2, 2, 4)
    function = partial(sparse_mla, deterministic=deterministic)
    out, lse, grad_q, grad_kv = _run(function, q, kv, indices, 4, grad)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (grad_q == 0).all()
    assert grad_kv.shape == (0, 5)


@pytest.mark.usefixtures("poisoned_empty")
def test_chunks_of_queries_change_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 queries in chunks of 8, the last one smaller; their heads in two parts."""
    q, kv, grad = torch.randn(20, 17, 6), torch.randn(30, 6), torch.randn(20, 17, 4)
    indices = oracles.random_selection(20, 30, 7)
    function = partial(sparse_mla, deterministic=True)
    whole = _run(function, q, kv, indices, 4, grad)
    assert repeatable._chunk(20, 1, 1) == 24
    monkeypatch.setattr(repeatable, "ROW_BYTES", 1)
    assert repeatable._chunk(20, 1, 1) == 8
    for ours, theirs in zip(_run(function, q, kv, indices, 4, grad), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("queries_per_row", [2, 3, 16])
@pytest.mark.parametrize(("t_q", "t_k", "topk"), [(1, 1, 1), (16, 9, 4), (5, 70, 33), (0, 3, 2)])
def test_unions_name_the_keys_of_neighbouring_queries(
    t_q: int, t_k: int, topk: int, queries_per_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_MARK_BYTES", 2 * 4 * t_k)
    indices = oracles.random_selection(t_q, t_k, topk)
    union = selection.unions(indices, t_k, queries_per_row)
    assert len(union.indices) == -(-t_q // queries_per_row)
    for row, queries in enumerate(indices.split(queries_per_row) if t_q else ()):
        chosen = [{int(key) for key in query if key >= 0} for query in queries]
        keys = sorted(set().union(*chosen))
        assert union.lengths[row] == len(keys)
        assert union.indices[row, : len(keys)].tolist() == keys
        bits = [sum((key in query) << b for b, query in enumerate(chosen)) for key in keys]
        assert union.members[row, : len(keys)].tolist() == bits


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("t_q", "t_k", "topk"), [(1, 1, 1), (40, 9, 4), (5, 70, 33), (0, 3, 2)])
def test_key_lists_name_the_entries_of_each_key(t_q: int, t_k: int, topk: int) -> None:
    indices = oracles.random_selection(t_q, t_k, topk)
    lists = key_lists(indices, row_lengths.row_lengths(indices), t_k)
    for key in range(t_k):
        expected = (indices.flatten() == key).nonzero().flatten()
        assert lists.counts[key] == len(expected)
        assert torch.equal(lists.entries[key, : len(expected)].long(), expected)


def test_rows_stop_at_their_last_key() -> None:
    indices = torch.full((4, 40), -1, dtype=torch.int32)
    indices[1, 0] = 7
    indices[2, :40] = torch.arange(40)
    indices[3, 33] = 0
    assert row_lengths.row_lengths(indices).tolist() == [0, 1, 40, 34]


def test_nan_reaches_every_result() -> None:
    q, kv = torch.randn(2, 2, 4), torch.randn(5, 4)
    kv[3] = torch.nan
    indices = torch.tensor([[0, 3], [0, 1]], dtype=torch.int32)
    out, lse = sparse_mla(q, kv, indices, SCALE, 3)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


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
    for deterministic in (False, True):
        function = partial(sparse_mla, deterministic=deterministic)
        results = _run(function, q.cuda(), kv.cuda(), indices.cuda(), d_v, grad.cuda())
        ours = [x.cpu() for x in results]
        for mine, theirs, true in zip(ours, naive, exact, strict=True):
            finite = true.isfinite()
            assert torch.equal(mine.isfinite(), finite)
            rounding = torch.finfo(torch.bfloat16).eps * true[finite].abs().max()
            mine_off, theirs_off = ((x.double() - true)[finite].abs().max() for x in (mine, theirs))
            assert mine_off <= 2 * theirs_off + rounding


@pytest.mark.gpu
@pytest.mark.parametrize("h", [8, 64, 65])
@pytest.mark.parametrize(("d_qk", "d_v"), [(576, 512), (80, 64)])
def test_deterministic_gradients_have_the_same_bits(
    h: int, d_qk: int, d_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some hundred programs add to the same keys; by atomics the bits change, in order not."""
    t_q, t_k, topk = 500, 300, 200
    monkeypatch.setattr(repeatable, "ROW_BYTES", 200 * topk * d_qk * 2)
    q, kv = torch.randn(t_q, h, d_qk).bfloat16(), torch.randn(t_k, d_qk).bfloat16()
    indices, grad = oracles.random_selection(t_q, t_k, topk), torch.randn(t_q, h, d_v).bfloat16()
    inputs = q.cuda(), kv.cuda(), indices.cuda(), d_v, grad.cuda()

    def distinct(deterministic: bool) -> int:
        function = partial(sparse_mla, deterministic=deterministic)
        results = [_run(function, *inputs) for _ in range(8)]
        same = [all(map(torch.equal, results[0], other)) for other in results[1:]]
        return same.count(False)

    assert distinct(deterministic=True) == 0
    assert distinct(deterministic=False) > 0
