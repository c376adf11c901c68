"""The tilelang backend: its padding and conventions on the CPU, its kernels on a GPU.

On the CPU plain PyTorch stands in for Megatron-Core's kernels and takes exactly the sizes that
they take.
"""

import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops import torch_backend
from glm5.ops.backends import backend_report, get_backend
from tests.ops import oracles

SCALE = 0.3
MODULE = "glm5.ops.tilelang_backend"
needs_tilelang = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None, reason="needs tilelang"
)


class StandIn:
    """Megatron-Core's functions, in fp32, with what they demand of their inputs."""

    @staticmethod
    def attend(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        assert q.shape[2] == 576 and kv.shape[1:] == (1, 576) and indices.shape[1] == 1
        assert heads >= 16 and heads & (heads - 1) == 0
        assert q.dtype == kv.dtype == torch.bfloat16 and q.is_contiguous()
        out, lse = torch_backend.sparse_mla(q.float(), kv[:, 0].float(), indices[:, 0], scale, 512)
        return out.bfloat16(), torch.where(lse == -torch.inf, 0, lse / math.log(2))

    @staticmethod
    def index_scores(
        q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, **_: Any
    ) -> Tensor:
        assert q.shape[1] in (8, 16, 32, 64) and q.shape[2] % 64 == 0 == k.shape[1] % 64
        assert q.dtype == k.dtype == torch.bfloat16 and weights.dtype == torch.float32
        assert starts.dtype == ends.dtype == torch.int32
        return oracles.index_scores(q.float(), k.float(), weights)

    @classmethod
    def selected_scores(cls, *args: Any, topk_indices: Tensor) -> tuple[Tensor, Tensor]:
        *tensors, topk = args
        assert topk == topk_indices.shape[1]
        scores = cls.index_scores(*tensors).gather(1, topk_indices.clamp(min=0).long())
        return scores.masked_fill(topk_indices < 0, -torch.inf), topk_indices

    @staticmethod
    def target(q: Tensor, kv: Tensor, topk_indices: Tensor, scale: float) -> Tensor:
        assert q.shape[2] % 16 == 0 and topk_indices.shape[1] % 64 == 0
        logits = torch.einsum("thd,tnd->thn", q.float(), kv.float()[topk_indices.clamp(min=0)])
        logits = (logits * scale).masked_fill((topk_indices < 0)[:, None], -torch.inf)
        return logits.softmax(-1).nan_to_num(0).sum(1)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "tilelang", types.ModuleType("tilelang"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = get_backend("tilelang")
    attention = types.SimpleNamespace(apply=StandIn.attend)
    monkeypatch.setattr(module, "SparseMLA", attention)
    monkeypatch.setattr(module, "indexer_fwd_interface", StandIn.index_scores)
    monkeypatch.setattr(module, "lighting_indexer", StandIn.selected_scores)
    monkeypatch.setattr(module, "sparse_indexer_target_interface", StandIn.target)
    monkeypatch.setattr(module, "_SCORE_BYTES", 4 * 40)
    yield module
    del sys.modules[MODULE]


def _attend(
    function: Any, q: Tensor, kv: Tensor, indices: Tensor, d_v: int, scale: float = SCALE
) -> list[Tensor]:
    q, kv = (x.detach().clone().requires_grad_() for x in (q, kv))
    out, lse = function(q, kv, indices, scale, d_v)
    grad = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view_as(out).sin()
    return [out.detach(), lse, *torch.autograd.grad(out, (q, kv), grad)]


@pytest.mark.parametrize(
    ("t_q", "t_k", "h", "d_qk", "d_v", "topk"),
    [
        (5, 9, 1, 6, 4, 3),
        (7, 9, 17, 24, 24, 9),
        (3, 9, 16, 576, 512, 2),
        (0, 3, 2, 6, 4, 2),
        (2, 3, 2, 6, 4, 0),
    ],
)
def test_attention_is_padded_to_what_the_kernels_take(
    backend: Any, t_q: int, t_k: int, h: int, d_qk: int, d_v: int, topk: int
) -> None:
    q, kv = torch.randn(t_q, h, d_qk).bfloat16(), torch.randn(t_k, d_qk).bfloat16()
    indices = oracles.random_selection(t_q, t_k, topk)
    expected = _attend(torch_backend.sparse_mla, q, kv, indices, d_v)
    for ours, theirs in zip(
        _attend(backend.sparse_mla, q, kv, indices, d_v), expected, strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("h", [1, 3, 8])
@pytest.mark.parametrize("lengths", [(1,), (5,), (2, 0, 9, 1)])
def test_selection_is_exact(backend: Any, lengths: tuple[int, ...], h: int) -> None:
    t, topk = sum(lengths), 4
    q, k, weights = (torch.randint(-2, 3, s).float() for s in ((t, h, 3), (t, 3), (t, h)))
    starts, ends = oracles.causal_bounds(*lengths)
    expected = oracles.select(oracles.index_scores(q, k, weights), starts, ends, topk)
    selected = backend.select_topk(q.bfloat16(), k.bfloat16(), weights, starts, ends, topk)
    assert torch.equal(selected, expected)


@pytest.mark.parametrize(("t_q", "t_k", "topk"), [(9, 9, 5), (4, 20, 70), (0, 3, 2), (3, 4, 0)])
def test_the_indexers_loss_equals_the_reference(
    backend: Any, t_q: int, t_k: int, topk: int
) -> None:
    index = [torch.randn(t_q, 3, 5).bfloat16(), torch.randn(t_k, 5).bfloat16(), torch.randn(t_q, 3)]
    q, kv = torch.randn(t_q, 2, 7).bfloat16(), torch.randn(t_k, 7).bfloat16()
    indices = oracles.random_selection(t_q, t_k, topk)
    found = []
    for module in (backend, torch_backend):
        leaves = [x.clone().requires_grad_() for x in index]
        *_, mass = module.sparse_mla_with_mass(q, kv, indices, SCALE, 4)
        assert mass.shape == indices.shape and not mass.requires_grad
        kl = module.indexer_kl(*leaves, indices, mass)
        found.append([kl.detach(), *torch.autograd.grad(kl.sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=1e-2 if ours.ndim > 1 else 1e-5, rtol=1e-2)


def test_what_megatron_does_not_have_is_refused(backend: Any) -> None:
    q, kv = torch.randn(2, 2, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    weights, lse, bound = torch.randn(2, 2), torch.zeros(2, 2), torch.ones(2, dtype=torch.int32)
    indices = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(BackendError, match=r"(?s)no dense form.*dense warm-up"):
        backend.indexer_kl_dense(q, kv, weights, q, kv, lse, SCALE, bound, bound)
    with pytest.raises(BackendError, match="bf16 only"):
        backend.indexer_kl(q.float(), kv.float(), weights, indices, torch.zeros(2, 1))
    with pytest.raises(BackendError, match="bf16 only"):
        backend.sparse_mla(q.float(), kv.float(), indices, SCALE, 8)
    with pytest.raises(BackendError, match="bf16 only"):
        backend.select_topk(q.half(), kv.half(), weights, bound, bound, 1)
    with pytest.raises(BackendError, match="same bits"):
        backend.sparse_mla(q, kv, indices, SCALE, 8, deterministic=True)
    for heads, d_qk, d_v in ((129, 8, 8), (2, 600, 513), (2, 100, 8)):
        q, kv = torch.randn(2, heads, d_qk).bfloat16(), torch.randn(3, d_qk).bfloat16()
        with pytest.raises(BackendError, match="these sizes"):
            backend.sparse_mla(q, kv, indices, SCALE, d_v)
    q, kv = torch.randn(2, 65, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    with pytest.raises(BackendError, match="index heads"):
        backend.select_topk(q, kv, torch.randn(2, 65), bound, bound, 1)


def test_a_missing_package_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(sys.modules, "tilelang", None)
    with pytest.raises(BackendError, match=r"(?s)tilelang.*cannot run here.*pip install.*tilelang"):
        get_backend("tilelang")
    report = {status.name: status for status in backend_report()}
    assert "pip install tilelang" in report["tilelang"].reason


def _long_selection(t: int) -> Tensor:
    """GLM-5's topk, with which the benchmark runs too: kernels are compiled for each topk."""
    indices = oracles.random_selection(t, t, 128)
    return torch.nn.functional.pad(indices, (0, 2048 - 128), value=-1).cuda()


@pytest.mark.gpu
@needs_tilelang
@pytest.mark.parametrize("h", [8, 64])
def test_the_kernels_agree_with_ours(h: int) -> None:
    """Neither's error against exact arithmetic is more than twice the other's.

    A negative control: with other keys they are far apart.
    """
    t, d_qk, d_v, scale = 300, 576, 512, 1 / 16
    q, kv = (torch.randn(s, device="cuda").bfloat16() for s in ((t, h, d_qk), (t, d_qk)))
    indices = _long_selection(t)
    exact = _attend(torch_backend.sparse_mla, q.float(), kv.float(), indices, d_v, scale)
    ours = _attend(get_backend("triton").sparse_mla, q, kv, indices, d_v, scale)
    theirs = _attend(get_backend("tilelang").sparse_mla, q, kv, indices, d_v, scale)
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        finite = true.isfinite()
        assert torch.equal(other.isfinite(), finite)
        error, bound = ((x.float() - true)[finite].norm() for x in (other, mine))
        rounding = 1e-5 * true[finite].norm()
        assert error <= 2 * bound + rounding
        assert bound <= 2 * error + rounding
    wrong = _attend(get_backend("tilelang").sparse_mla, q, 1.1 * kv, indices, d_v, scale)
    assert (wrong[0].float() - exact[0]).norm() > 10 * (theirs[0].float() - exact[0]).norm()


@pytest.mark.gpu
@needs_tilelang
def test_its_selection_and_loss_agree_with_ours() -> None:
    t, topk, h_i, d_i, scale = 700, 128, 32, 128, 1 / 16
    starts, ends = (x.cuda() for x in oracles.causal_bounds(300, 1, 399))
    q, k = (torch.randn(s, device="cuda").bfloat16() for s in ((t, h_i, d_i), (t, d_i)))
    weights = torch.randn(t, h_i, device="cuda") * (h_i * d_i) ** -0.5
    selected = [
        get_backend(name).select_topk(q, k, weights, starts, ends, topk)
        for name in ("tilelang", "triton")
    ]
    # Sums in another order may swap keys whose scores agree to the last bits.
    assert (selected[0] != selected[1]).any(1).float().mean() < 0.02
    attention = [torch.randn(s, device="cuda").bfloat16() for s in ((t, 64, 576), (t, 576))]
    indices = _long_selection(t)
    found = []
    for name in ("tilelang", "triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in (q, k, weights)]
        *_, mass = get_backend(name).sparse_mla_with_mass(*attention, indices, scale, 512)
        kl = get_backend(name).indexer_kl(*leaves, indices, mass)
        found.append([mass, kl.detach(), *torch.autograd.grad(kl.sum(), leaves)])
    for other, mine, true in zip(*found, strict=True):
        for x in (other, mine):
            assert (x.float() - true.float()).norm() <= 1e-2 * true.float().norm()
