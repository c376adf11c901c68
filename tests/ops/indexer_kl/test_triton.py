"""Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py switches on."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.indexer_kl import reference
from glm5.ops.indexer_kl.autograd import indexer_kl
from glm5.ops.sparse_mla.reference import sparse_mla
from tests.ops import oracles

SCALE = 0.4
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _inputs(t_q: int, t_k: int, h_i: int, d_i: int, h: int, d_qk: int) -> list[Tensor]:
    """index_q, index_k, index_weights, q, kv in fp32."""
    return [
        torch.randn(shape)
        for shape in ((t_q, h_i, d_i), (t_k, d_i), (t_q, h_i), (t_q, h, d_qk), (t_k, d_qk))
    ]


def _selection(t_q: int, t_k: int, topk: int) -> Tensor:
    """As oracles.random_selection; the last row is a hole between two keys."""
    indices = oracles.random_selection(t_q, t_k, topk)
    if t_q and topk > 2 and t_k > 2:
        indices[-1] = -1
        indices[-1, 0], indices[-1, 2] = 0, t_k - 1
    return indices


def _dense_lse(q: Tensor, kv: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    positions = torch.arange(len(kv))
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    logits = torch.einsum("thd,sd->ths", q, kv) * SCALE
    return logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)


def _run(function: Any, inputs: list[Tensor], lse: Tensor, grad: Tensor, **keys: Any) -> Results:
    """kl and the gradients in the index tensors."""
    index = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    kl = function(*index, *inputs[3:], lse, SCALE, **keys)
    return kl.detach(), *torch.autograd.grad(kl, index, grad)


def _assert_same(inputs: list[Tensor], lse: Tensor, **keys: Any) -> None:
    grad = torch.randn(len(lse))
    expected = _run(reference.indexer_kl, inputs, lse, grad, **keys)
    for ours, theirs in zip(_run(indexer_kl, inputs, lse, grad, **keys), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("sizes", "topk"),
    [
        ((2, 1, 1, 1, 1, 1), 1),
        ((4, 9, 3, 6, 3, 6), 20),
        ((5, 40, 17, 20, 17, 24), 37),
        ((3, 80, 2, 40, 33, 70), 65),
        ((0, 4, 2, 5, 2, 5), 2),
        ((3, 4, 2, 5, 2, 5), 0),
        ((3, 0, 2, 5, 2, 5), 2),
    ],
)
def test_sparse_form_equals_the_reference(sizes: tuple[int, ...], topk: int) -> None:
    inputs = _inputs(*sizes)
    indices = _selection(*sizes[:2], topk)
    _, lse = sparse_mla(*inputs[3:], indices, SCALE, 1)
    _assert_same(inputs, lse, topk_indices=indices)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("rows_per_block", [2, 1000])
@pytest.mark.parametrize("lengths", [(1,), (4, 0, 9)])
def test_dense_form_equals_the_reference(
    lengths: tuple[int, ...], rows_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5.ops.indexer_kl.autograd._SCRATCH_BYTES", rows_per_block * 512)
    t = sum(lengths)
    inputs, (starts, ends) = _inputs(t, t, 3, 20, 2, 24), oracles.causal_bounds(*lengths)
    ends[t // 2] = 0
    _assert_same(inputs, _dense_lse(*inputs[3:], starts, ends), starts=starts, ends=ends)


@pytest.mark.parametrize("function", [reference.indexer_kl, indexer_kl])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_heads_of_other_ranks_are_added(function: Any, is_sparse: bool) -> None:
    """Two ranks of two heads each, one after the other, find what one rank of four heads finds."""
    inputs, (starts, ends) = _inputs(5, 5, 3, 6, 4, 8), oracles.causal_bounds(5)
    keys: dict[str, Any] = {"starts": starts, "ends": ends}
    lse = _dense_lse(*inputs[3:], starts, ends)
    if is_sparse:
        keys = {"topk_indices": oracles.random_selection(5, 5, 3)}
        _, lse = sparse_mla(*inputs[3:], keys["topk_indices"], SCALE, 1)
    whole, grad = _run(function, inputs, lse, torch.ones(5), **keys), torch.ones(5)
    halves = [
        ([*inputs[:3], inputs[3][:, heads].contiguous(), inputs[4]], lse[:, heads].contiguous())
        for heads in (slice(0, 2), slice(2, 4))
    ]
    masses: list[Tensor] = []
    _run(function, *halves[1], grad, **keys, sum_over_ranks=lambda x: masses.append(x.clone()))
    calls = iter(masses)
    half = _run(function, *halves[0], grad, **keys, sum_over_ranks=lambda x: x.add_(next(calls)))
    for ours, theirs in zip(half, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    t_q, t_k, topk = (data.draw(st.integers(0, 5)) for _ in range(3))
    sizes = [data.draw(st.integers(1, 40)) for _ in range(4)]
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    inputs = _inputs(t_q, t_k, *sizes)
    inputs[3] /= sizes[3]
    if data.draw(st.booleans()):
        indices = oracles.random_selection(t_q, t_k, topk)
        _, lse = sparse_mla(*inputs[3:], indices, SCALE, 1)
        _assert_same(inputs, lse, topk_indices=indices)
        return
    edges = torch.randint(0, t_k + 1, (2, t_q)).int()
    bounds = {"starts": edges.amin(0), "ends": edges.amax(0)}
    _assert_same(inputs, _dense_lse(*inputs[3:], **bounds), **bounds)


def test_a_nan_reaches_the_loss() -> None:
    for place in range(5):
        inputs = _inputs(3, 3, 2, 4, 2, 5)
        indices = torch.tensor([[0, 1], [0, 2], [1, 2]], dtype=torch.int32)
        _, lse = sparse_mla(*inputs[3:], indices, SCALE, 1)
        inputs[place][1] = torch.nan
        kl = indexer_kl(*inputs, lse, SCALE, topk_indices=indices)
        assert kl[1 if place in (0, 2, 3) else 0].isnan()


def test_dtypes_that_the_kernels_do_not_know_are_refused() -> None:
    inputs = [x.double() for x in _inputs(2, 3, 2, 4, 2, 5)]
    indices = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(BackendError, match="dtypes"):
        indexer_kl(*inputs, torch.zeros(2, 2), SCALE, topk_indices=indices)


def test_the_dense_form_makes_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernels are given per query and key is one block of rows."""
    module = "glm5.ops.indexer_kl.autograd"
    made: list[Tensor] = []
    monkeypatch.setattr(f"{module}._SCRATCH_BYTES", 7 * 384 * 4)
    monkeypatch.setattr(f"{module}.attention_mass", lambda *args: made.append(args[-1]))
    monkeypatch.setattr(f"{module}.divergence", lambda *args: made.append(args[-2]))
    monkeypatch.setattr(f"{module}.score_grads", lambda *args: made.append(args[0]))
    inputs, (starts, ends) = _inputs(300, 300, 1, 2, 1, 2), oracles.causal_bounds(300)
    lse = _dense_lse(*inputs[3:], starts, ends)
    _run(indexer_kl, inputs, lse, torch.ones(300), starts=starts, ends=ends)
    num_blocks = 43
    assert len(made) == 5 * num_blocks
    assert {tuple(x.shape) for x in made} == {(7, 384), (300 - 42 * 7, 384)}


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize(
    ("h_i", "d_i", "h", "d_qk"),
    [(32, 128, 64, 576), (32, 128, 8, 576), (3, 24, 65, 80), (64, 128, 128, 576)],
)
def test_bf16_error_is_at_most_twice_that_of_plain_pytorch(
    form: str, h_i: int, d_i: int, h: int, d_qk: int
) -> None:
    scale, (starts, ends) = d_qk**-0.5, oracles.causal_bounds(1, 63, 64, 65, 207)
    t = len(starts)
    inputs = [x.cuda() for x in _inputs(t, t, h_i, d_i, h, d_qk)]
    inputs = [x if i == 2 else x.bfloat16() for i, x in enumerate(inputs)]
    inputs[2] *= (h_i * d_i) ** -0.5
    starts, ends = starts.cuda(), ends.cuda()
    indices = _selection(t, t, 100).cuda()
    positions = torch.arange(t, device="cuda")
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    keys: dict[str, Any] = {"starts": starts, "ends": ends}
    if form == "sparse":
        mask = torch.zeros(t, t + 1, dtype=torch.bool, device="cuda")
        mask = mask.scatter_(1, indices.long().where(indices >= 0, t), True)[:, :t]
        keys = {"topk_indices": indices}
    grad = torch.randn(t, device="cuda")
    wide = [x.double() for x in inputs]
    logits = torch.einsum("thd,sd->ths", wide[3], wide[4]) * scale
    lse = logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1).float()

    def plain(*tensors: Any, **_: Any) -> Tensor:
        return oracles.kl(oracles.index_scores(*tensors[:3]), *tensors[3:5], mask, scale)

    exact = _run(plain, wide, lse, grad.double())
    rounded = [x.bfloat16() for x in inputs]
    naive = _run(plain, rounded, lse, grad.bfloat16())
    torch.full((2**26,), torch.nan, device="cuda")  # left behind for the outputs to be written in

    def ours(*tensors: Any, **key_set: Any) -> Tensor:
        return indexer_kl(*tensors[:6], scale, **key_set)

    for mine, theirs, true in zip(_run(ours, inputs, lse, grad, **keys), naive, exact, strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * true.abs().max()
        my_error, their_error = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert my_error <= 2 * their_error + rounding


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("sizes", [(3, 24, 33, 80), (32, 128, 64, 576)])
def test_fp32_on_a_gpu_equals_the_reference(form: str, sizes: tuple[int, ...]) -> None:
    starts, ends = (x.cuda() for x in oracles.causal_bounds(1, 63, 64, 65))
    t = len(starts)
    inputs = [x.cuda() for x in _inputs(t, t, *sizes)]
    inputs[2] *= 0.1
    keys: dict[str, Any] = {"topk_indices": _selection(t, t, 100).cuda()}
    mask = torch.zeros(t, t + 1, dtype=torch.bool, device="cuda")
    indices = keys["topk_indices"].long()
    mask = mask.scatter_(1, indices.where(indices >= 0, t), True)[:, :t]
    if form == "dense":
        keys = {"starts": starts, "ends": ends}
        positions = torch.arange(t, device="cuda")
        mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    logits = torch.einsum("thd,sd->ths", inputs[3], inputs[4]) * SCALE
    lse = logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)
    grad = torch.randn(t, device="cuda")
    expected = _run(reference.indexer_kl, inputs, lse, grad, **keys)
    for ours, theirs in zip(_run(indexer_kl, inputs, lse, grad, **keys), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
