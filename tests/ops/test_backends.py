import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.backends import (
    Backend,
    backend_report,
    default_backend,
    get_backend,
)
from tests.ops import oracles

SCALE, TOPK = 0.3, 4
MCORE_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"


@pytest.fixture(scope="module", params=["torch", "megatron"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


def _integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


@pytest.mark.parametrize("h", [1, 3, 5])
@pytest.mark.parametrize(
    "lengths", [(), (1,), (TOPK - 1,), (TOPK,), (TOPK + 1,), (2, 0, TOPK + 3, 1, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_with_ties(
    backend: Backend, lengths: tuple[int, ...], h: int, dtype: torch.dtype
) -> None:
    t = sum(lengths)
    q, k, weights = _integers(t, h, 3), _integers(t, 3), _integers(t, h)
    starts, ends = oracles.causal_bounds(*lengths)
    expected = oracles.select(oracles.index_scores(q, k, weights), starts, ends, TOPK)
    selected = backend.select_topk(q.to(dtype), k.to(dtype), weights, starts, ends, TOPK)
    assert selected.dtype == torch.int32
    assert torch.equal(selected, expected)


@pytest.mark.parametrize("h", [1, 2, 5])
@pytest.mark.parametrize(
    ("t_q", "t_k", "topk"),
    [(0, 0, 3), (0, 4, 3), (4, 0, 3), (4, 4, 0), (1, 1, 1), (2, 9, 4), (9, 3, 4), (17, 17, 4)],
)
def test_attention(backend: Backend, t_q: int, t_k: int, topk: int, h: int) -> None:
    q, kv = torch.randn(t_q, h, 6).requires_grad_(), torch.randn(t_k, 6).requires_grad_()
    indices, grad = oracles.random_selection(t_q, t_k, topk), torch.randn(t_q, h, 4)
    out, lse, mass = backend.sparse_mla_with_mass(q, kv, indices, SCALE, 4)
    assert out.shape == (t_q, h, 4)
    assert lse.shape == (t_q, h)
    assert mass.shape == (t_q, topk) and mass.dtype == torch.float32
    assert not lse.requires_grad and not mass.requires_grad
    for x, y in zip((out, lse), backend.sparse_mla(q, kv, indices, SCALE, 4), strict=True):
        assert torch.equal(x, y)
    grads = torch.autograd.grad(out, (q, kv), grad)
    if t_q == 0:
        assert all((g == 0).all() for g in grads)
        return
    expected, expected_lse = oracles.attention(q, kv, indices, SCALE, 4)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.float())
    torch.testing.assert_close(mass, oracles.mass(q, kv, indices, SCALE).float())
    for ours, theirs in zip(grads, torch.autograd.grad(expected, (q, kv), grad), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_indexer_loss(backend: Backend, form: str) -> None:
    t, (starts, ends) = 11, oracles.causal_bounds(4, 1, 6)
    indices = oracles.random_selection(t, t, TOPK)
    positions = torch.arange(t)
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    if form == "sparse":
        mask = torch.stack([torch.isin(positions, row) for row in indices])
    index = [torch.randn(s, requires_grad=True) for s in ((t, 3, 4), (t, 4), (t, 3))]
    q, kv, grad = torch.randn(t, 2, 6), torch.randn(t, 6), torch.randn(t)
    logits = torch.einsum("thd,sd->ths", q, kv) * SCALE
    lse = logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)
    expected = oracles.kl(oracles.index_scores(*index), q, kv, mask, SCALE)
    if form == "sparse":
        *_, mass = backend.sparse_mla_with_mass(q, kv, indices, SCALE, 4)
        kl = backend.indexer_kl(*index, indices, mass)
    else:
        kl = backend.indexer_kl_dense(*index, q, kv, lse, SCALE, starts, ends)
    torch.testing.assert_close(kl, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(kl, index, grad)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, index, grad), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_autocast_changes_nothing(backend: Backend) -> None:
    q, k, weights = torch.randn(5, 2, 4), torch.randn(9, 4), torch.randn(5, 2)
    ends, indices = torch.full((5,), 9, dtype=torch.int32), oracles.random_selection(5, 9, 3)

    def run() -> list[Tensor]:
        out, lse, mass = backend.sparse_mla_with_mass(q, k, indices, SCALE, 4)
        kl = backend.indexer_kl(q, k, weights, indices, mass)
        every = q, k, weights, q, k, lse.clamp(min=0), SCALE, ends - 9, ends
        selected = backend.select_topk(q, k, weights, ends - 9, ends, 3)
        return [out, lse, mass, kl, backend.indexer_kl_dense(*every), selected]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrowed = run()
    for ours, theirs in zip(narrowed, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_that_do_not_fit_are_refused(backend: Backend) -> None:
    q, k, weights = torch.randn(3, 2, 4), torch.randn(5, 4), torch.randn(3, 2)
    bound, indices = torch.full((3,), 5, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
    starts, lse, mass = bound - 5, torch.zeros(3, 2), torch.ones(3, 1)
    for wrong in (k[:, :3], k[None], k.to("meta")):
        with pytest.raises(BackendError, match="do not fit together"):
            backend.select_topk(q, wrong, weights, starts, bound, 2)
        for attend in (backend.sparse_mla, backend.sparse_mla_with_mass):
            with pytest.raises(BackendError, match="do not fit together"):
                attend(q, wrong, indices, SCALE, 4)
        with pytest.raises(BackendError, match="do not fit together"):
            backend.indexer_kl(q, wrong, weights, indices, mass)
        with pytest.raises(BackendError, match="do not fit together"):
            backend.indexer_kl_dense(q, k, weights, q, wrong, lse, SCALE, starts, bound)
    for d_v in (-1, 0, 5):
        with pytest.raises(BackendError, match=f"(?s)do not fit together.*d_v {d_v}"):
            backend.sparse_mla(q, k, indices, SCALE, d_v)


def test_keys_that_do_not_exist_are_refused(backend: Backend) -> None:
    q, k, weights = torch.randn(3, 2, 4), torch.randn(5, 4), torch.randn(3, 2)
    bound, indices = torch.full((3,), 6, dtype=torch.int32), torch.full((3, 1), 5).int()
    for call in (
        lambda: backend.select_topk(q, k, weights, bound - 6, bound, 2),
        lambda: backend.sparse_mla(q, k, indices, SCALE, 4),
        lambda: backend.sparse_mla_with_mass(q, k, indices, SCALE, 4),
        lambda: backend.indexer_kl(q, k, weights, indices, torch.ones(3, 1)),
        lambda: backend.indexer_kl_dense(
            q, k, weights, q, k, torch.zeros(3, 2), SCALE, bound - 6, bound
        ),
    ):
        with pytest.raises(BackendError, match="keys that do not exist"):
            call()


def test_bf16_backends_agree_within_their_rounding() -> None:
    q, kv = torch.randn(33, 4, 24).bfloat16(), torch.randn(33, 24).bfloat16()
    indices = oracles.random_selection(33, 33, 8)
    exact, _ = oracles.attention(q.double(), kv.double(), indices, SCALE, 16)
    errors = []
    for name in ("torch", "megatron"):
        out, lse = get_backend(name).sparse_mla(q, kv, indices, SCALE, 16)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        errors.append((out - exact).abs().max())
    # Megatron-Core rounds the probabilities to bf16; ours does not.
    assert errors[0] <= errors[1] <= 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_backends_agree_on_random_shapes(data: st.DataObject) -> None:
    t_q, t_k, topk = (data.draw(st.integers(0, 12)) for _ in range(3))
    h, d = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    edges = torch.randint(0, t_k + 1, (2, t_q)).int()
    q, k, weights = _integers(t_q, h, d), _integers(t_k, d), _integers(t_q, h)
    ours, theirs = get_backend("torch"), get_backend("megatron")
    selected = ours.select_topk(q, k, weights, edges.amin(0), edges.amax(0), topk)
    again = theirs.select_topk(q, k, weights, edges.amin(0), edges.amax(0), topk)
    assert torch.equal(selected, again)
    for x, y in zip(
        ours.sparse_mla_with_mass(q, k, selected, SCALE, d),
        theirs.sparse_mla_with_mass(q, k, selected, SCALE, d),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_which_backends_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = backend_report()
    assert [s.name for s in report if s.available] == ["torch", "megatron"]
    assert {s.name for s in report if s.reason} == {"triton", "tilelang", "cudnn"}
    with pytest.raises(BackendError, match=r"(?s)triton.*no CUDA device.*remedy"):
        get_backend("triton")
    assert (default_backend("cpu"), default_backend("cuda")) == ("torch", "triton")


def test_unknown_names_raise() -> None:
    with pytest.raises(BackendError, match=r"(?s)tritn.*torch, triton, tilelang, cudnn, megatron"):
        get_backend("tritn")
    with pytest.raises(BackendError, match=r"(?s)mps.*cpu, cuda"):
        default_backend("mps")


def test_a_missing_package_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "glm5.ops.peers", raising=False)
    monkeypatch.setitem(sys.modules, MCORE_DSA, None)
    with pytest.raises(BackendError, match=r"(?s)megatron.*cannot run here.*pip install"):
        get_backend("megatron")
    report = {status.name: status for status in backend_report()}
    assert report["torch"].available and not report["megatron"].available
    assert MCORE_DSA in report["megatron"].reason


def test_megatron_is_not_imported_until_asked_for() -> None:
    code = (
        "import sys; from glm5.ops.backends import get_backend; get_backend('torch');"
        "sys.exit('megatron' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 0
