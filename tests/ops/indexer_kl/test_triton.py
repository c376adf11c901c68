"""Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py switches on."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.indexer_kl import reference
from glm5.ops.indexer_kl.autograd import indexer_kl, indexer_kl_dense
from glm5.ops.sparse_mla.autograd import sparse_mla_with_mass as fused_with_mass
from glm5.ops.sparse_mla.reference import sparse_mla_with_mass
from tests.ops import oracles
from tests.ops.random_shapes import random_shapes

SCALE = 0.4
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
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
    positions = torch.arange(len(kv), device=kv.device)
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    logits = torch.einsum("thd,sd->ths", q, kv) * SCALE
    return logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)


def _run(function: Any, inputs: list[Tensor], grad: Tensor, *rest: Any, **named: Any) -> Results:
    """kl and the gradients in the index tensors."""
    index = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    kl = function(*index, *rest, **named)
    return kl.detach(), *torch.autograd.grad(kl, index, grad)


def _assert_sparse_same(inputs: list[Tensor], indices: Tensor) -> None:
    """Both the loss and, before it, the attention that tells its target."""
    grad = torch.randn(len(indices), device=indices.device)
    found = []
    for attend, loss in (
        (fused_with_mass, indexer_kl),
        (sparse_mla_with_mass, reference.indexer_kl),
    ):
        *_, mass = attend(*inputs[3:], indices, SCALE, 1)
        found.append(_run(loss, inputs, grad, indices, mass))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def _assert_dense_same(inputs: list[Tensor], *bounds: Tensor) -> None:
    grad = torch.randn(len(bounds[0]), device=bounds[0].device)
    rest = *inputs[3:], _dense_lse(*inputs[3:], *bounds), SCALE, *bounds
    expected = _run(reference.indexer_kl_dense, inputs, grad, *rest)
    for ours, theirs in zip(_run(indexer_kl_dense, inputs, grad, *rest), expected, strict=True):
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
    _assert_sparse_same(_inputs(*sizes), _selection(*sizes[:2], topk))


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
    _assert_dense_same(inputs, starts, ends)


@pytest.mark.parametrize("attend", [sparse_mla_with_mass, fused_with_mass])
def test_the_mass_of_other_ranks_is_added(attend: Any) -> None:
    """Two heads on each of two ranks have the mass of four heads on one."""
    *_, q, kv = _inputs(5, 9, 3, 6, 4, 8)
    indices = oracles.random_selection(5, 9, 3)
    parts = [attend(x.contiguous(), kv, indices, SCALE, 4)[2] for x in (q, q[:, :2], q[:, 2:])]
    torch.testing.assert_close(parts[1] + parts[2], parts[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [reference.indexer_kl_dense, indexer_kl_dense])
def test_heads_of_other_ranks_are_added_in_the_dense_form(function: Any) -> None:
    """Two ranks of two heads each, one after the other, find what one rank of four heads finds."""
    inputs, bounds = _inputs(5, 5, 3, 6, 4, 8), oracles.causal_bounds(5)
    q, kv, grad = *inputs[3:], torch.ones(5)
    lse = _dense_lse(q, kv, *bounds)
    whole = _run(function, inputs, grad, q, kv, lse, SCALE, *bounds)
    halves = [
        (q[:, heads].contiguous(), kv, lse[:, heads].contiguous(), SCALE, *bounds)
        for heads in (slice(0, 2), slice(2, 4))
    ]
    masses: list[Tensor] = []
    _run(function, inputs, grad, *halves[1], sum_over_ranks=lambda x: masses.append(x.clone()))
    calls = iter(masses)
    half = _run(function, inputs, grad, *halves[0], sum_over_ranks=lambda x: x.add_(next(calls)))
    for ours, theirs in zip(half, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@random_shapes(50)
@given(data=st.data())
def test_random_shapes(data: st.DataObject, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("poisoned_empty")
    t_q, t_k, topk = (data.draw(st.integers(0, 5), name) for name in ("t_q", "t_k", "topk"))
    names = "h_i", "d_i", "h", "d_qk"
    # A kernel is compiled for each of the sizes on a GPU; the interpreter takes time by size.
    of_sizes = st.sampled_from((1, 3, 24, 33)) if ON_GPU else st.integers(1, 40)
    sizes = [data.draw(of_sizes, name) for name in names]
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    inputs = [x.to(DEVICE) for x in _inputs(t_q, t_k, *sizes)]
    # The scale of the model's own index weights: scores of 100 lose two digits more.
    inputs[2] *= (sizes[0] * sizes[1]) ** -0.5
    inputs[3] /= sizes[3]
    if data.draw(st.booleans(), "sparse"):
        _assert_sparse_same(inputs, _selection(t_q, t_k, topk).to(DEVICE))
        return
    edges = torch.randint(0, t_k + 1, (2, t_q)).int().to(DEVICE)
    _assert_dense_same(inputs, edges.amin(0), edges.amax(0))


def test_a_nan_reaches_the_loss() -> None:
    for place in range(5):
        inputs = _inputs(3, 3, 2, 4, 2, 5)
        indices = torch.tensor([[0, 1], [0, 2], [1, 2]], dtype=torch.int32)
        inputs[place][1] = torch.nan
        *_, mass = fused_with_mass(*inputs[3:], indices, SCALE, 1)
        kl = indexer_kl(*inputs[:3], indices, mass)
        assert kl[1 if place in (0, 2, 3) else 0].isnan()


def test_dtypes_that_the_kernels_do_not_know_are_refused() -> None:
    inputs = [x.double() for x in _inputs(2, 3, 2, 4, 2, 5)]
    indices, bound = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(BackendError, match="dtypes"):
        indexer_kl(*inputs[:3], indices, torch.zeros(2, 1))
    inputs[:3] = [x.float() for x in inputs[:3]]
    with pytest.raises(BackendError, match="dtypes"):
        indexer_kl_dense(*inputs, torch.zeros(2, 2), SCALE, bound, bound)


def test_the_mass_is_read_only_and_what_is_kept_is_as_large() -> None:
    inputs, indices = _inputs(4, 9, 2, 4, 2, 5), oracles.random_selection(4, 9, 3)
    *_, mass = fused_with_mass(*inputs[3:], indices, SCALE, 1)
    given = mass.clone()
    index = [x.requires_grad_() for x in inputs[:3]]
    kl = indexer_kl(*index, indices, mass)
    assert torch.equal(mass, given)
    saved = [x for x in kl.grad_fn.saved_tensors if all(x is not y for y in (*index, indices))]
    assert [(x.shape, x.dtype) for x in saved] == [(indices.shape, torch.float32)]


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
    _run(indexer_kl_dense, inputs, torch.ones(300), *inputs[3:], lse, SCALE, starts, ends)
    num_blocks = 43
    assert len(made) == 5 * num_blocks
    assert {tuple(x.shape) for x in made} == {(7, 384), (300 - 42 * 7, 384)}


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize(
    ("h_i", "d_i", "h", "d_qk"),
    [
        (32, 128, 64, 576),
        (32, 128, 8, 576),
        (32, 128, 17, 576),
        (3, 24, 65, 80),
        (64, 128, 128, 576),
    ],
)
def test_bf16_error_is_at_most_twice_that_of_plain_pytorch(
    form: str, h_i: int, d_i: int, h: int, d_qk: int
) -> None:
    """From the attention's inputs to the indexer's gradients."""
    scale, bounds = d_qk**-0.5, oracles.causal_bounds(1, 63, 64, 65, 207)
    t, d_v = len(bounds[0]), d_qk - 64 if d_qk == 576 else d_qk
    inputs = [x.cuda() for x in _inputs(t, t, h_i, d_i, h, d_qk)]
    inputs = [x if i == 2 else x.bfloat16() for i, x in enumerate(inputs)]
    inputs[2] *= (h_i * d_i) ** -0.5
    starts, ends = (x.cuda() for x in bounds)
    indices = oracles.random_selection(t, t, 100).cuda()
    positions = torch.arange(t, device="cuda")
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    if form == "sparse":
        mask = torch.zeros(t, t + 1, dtype=torch.bool, device="cuda")
        mask = mask.scatter_(1, indices.long().where(indices >= 0, t), True)[:, :t]
    grad = torch.randn(t, device="cuda")
    wide = [x.double() for x in inputs]
    logits = torch.einsum("thd,sd->ths", wide[3], wide[4]) * scale
    lse = logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1).float()

    def plain(*tensors: Tensor) -> Tensor:
        return oracles.kl(oracles.index_scores(*tensors[:3]), *tensors[3:5], mask, scale)

    exact = _run(plain, wide, grad.double(), *wide[3:])
    rounded = [x.bfloat16() for x in inputs]
    naive = _run(plain, rounded, grad.bfloat16(), *rounded[3:])
    torch.full((2**26,), torch.nan, device="cuda")  # left behind for the outputs to be written in
    if form == "sparse":
        *_, mass = fused_with_mass(*inputs[3:], indices, scale, d_v)
        ours = _run(indexer_kl, inputs, grad, indices, mass)
    else:
        ours = _run(indexer_kl_dense, inputs, grad, *inputs[3:], lse, scale, starts, ends)
    for mine, theirs, true in zip(ours, naive, exact, strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * true.abs().max()
        my_error, their_error = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert my_error <= 2 * their_error + rounding


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("sizes", [(3, 24, 33, 80), (32, 128, 64, 576)])
def test_fp32_on_a_gpu_equals_the_reference(form: str, sizes: tuple[int, ...]) -> None:
    bounds = [x.cuda() for x in oracles.causal_bounds(1, 63, 64, 65)]
    t = len(bounds[0])
    inputs = [x.cuda() for x in _inputs(t, t, *sizes)]
    inputs[2] *= 0.1
    grad, found = torch.randn(t, device="cuda"), []
    indices, lse = _selection(t, t, 100).cuda(), _dense_lse(*inputs[3:], *bounds)
    for attend, sparse, dense in (
        (fused_with_mass, indexer_kl, indexer_kl_dense),
        (sparse_mla_with_mass, reference.indexer_kl, reference.indexer_kl_dense),
    ):
        if form == "dense":
            found.append(_run(dense, inputs, grad, *inputs[3:], lse, SCALE, *bounds))
        else:
            *_, mass = attend(*inputs[3:], indices, SCALE, 1)
            found.append(_run(sparse, inputs, grad, indices, mass))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
