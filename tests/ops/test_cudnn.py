"""The cudnn backend: what it hands to NVIDIA's kernel on the CPU, the kernel itself on a GPU.

On the CPU plain PyTorch stands in for the kernels of both passes and takes exactly what they take.
"""

import importlib.util
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops import torch_backend
from glm5.ops.backends import backend_report, get_backend
from glm5.ops.sparse_mla import selection
from glm5.ops.sparse_mla.selection import Selection
from tests.ops import oracles

SCALE = 1 / 16
BACKEND, KERNELS = "glm5.ops.cudnn_backend", "glm5.ops.sparse_mla.cudnn"
FRONTEND = "cudnn.deepseek_sparse_attention"
needs_cudnn = pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend"
)


class StandIn:
    """The frontend's plan of one backward pass, with what the frontend demands of its inputs."""

    def __init__(self, *samples: Tensor, sample_topk_length: Tensor, softmax_scale: float) -> None:
        self.samples, self.scale, self.ready = samples, softmax_scale, False
        assert sample_topk_length.dtype == torch.int32

    def check_support(self) -> bool:
        q, kv, out, grad_out, lse, sink, indices = self.samples
        t_q, h, d_qk = q.shape
        assert h > 1 and d_qk == 576 and kv.shape == (len(kv), 576)
        assert out.shape == grad_out.shape == (t_q, h, 512) and lse.shape == (t_q, h)
        assert sink.shape == (h,) and len(indices) == t_q
        assert q.dtype == kv.dtype == out.dtype == grad_out.dtype == torch.bfloat16
        assert lse.dtype == sink.dtype == torch.float32 and indices.dtype == torch.int32
        for x in self.samples:
            assert x.is_contiguous() and x.data_ptr() % 16 == 0
        return True

    def compile(self) -> None:
        self.ready = True

    def scratch_workspace_bytes(self) -> int:
        return 5

    @torch.enable_grad()
    def execute(
        self,
        *inputs: Tensor,
        topk_length: Tensor,
        workspace: Tensor,
        d_sink: Tensor,
    ) -> None:
        *samples, grad_q, grad_kv = inputs
        assert self.ready and all(map(torch.equal, samples, self.samples))
        q, kv, _, grad_out, lse, sink, indices = samples
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 5
        assert (sink == -torch.inf).all() and d_sink.shape == sink.shape
        # What stands after a row's length is not read.
        columns = torch.arange(indices.shape[1])
        indices = indices.where(columns < topk_length[:, None], -1)
        leaves = [x.float().requires_grad_() for x in (q, kv)]
        again, expected_lse = torch_backend.sparse_mla(*leaves, indices, self.scale, 512)
        torch.testing.assert_close(lse, expected_lse)
        for result, grad in zip(
            (grad_q, grad_kv), torch.autograd.grad(again, leaves, grad_out.float()), strict=True
        ):
            result.copy_(grad)


def _forward(q: Tensor, kv: Tensor, selected: Selection, scale: float, d_v: int) -> Any:
    return torch_backend.sparse_mla(q, kv, selected.indices, scale, d_v)


def _lengths(topk_indices: Tensor) -> Tensor:
    if topk_indices.numel() == 0:
        return topk_indices.new_zeros(len(topk_indices))
    columns = torch.arange(1, topk_indices.shape[1] + 1)
    return (columns * (topk_indices >= 0)).amax(1).int()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    frontend = types.ModuleType(FRONTEND)
    frontend.SparseAttentionBackward = StandIn  # type: ignore[attr-defined]
    for name, module in (("cudnn", types.ModuleType("cudnn")), (FRONTEND, frontend)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in (BACKEND, KERNELS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    _pretend_hopper(monkeypatch)
    module = get_backend("cudnn")
    monkeypatch.setattr(module, "is_hopper", lambda q: True)
    monkeypatch.setattr(module.HopperKernels, "forward", staticmethod(_forward))
    monkeypatch.setattr(selection, "row_lengths", _lengths)
    yield module
    for name in (BACKEND, KERNELS):
        del sys.modules[name]


def _pretend_hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


def _attend(function: Any, q: Tensor, kv: Tensor, indices: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, log-sum-exp and the gradients in q and kv."""
    q, kv = (x.detach().clone().requires_grad_() for x in (q, kv))
    out, lse = function(q, kv, indices, SCALE, 512)
    grads = torch.autograd.grad(out, (q, kv), grad.to(out.dtype))
    return [out.detach(), lse.detach(), *grads]


def _assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal within bf16's rounding, and not finite in the same places."""
    for x, y in zip(found, expected, strict=True):
        finite = y.isfinite()
        assert x.dtype == y.dtype and torch.equal(x.isfinite(), finite)
        assert (x - y)[finite].float().norm() <= 1e-2 * y[finite].float().norm()


def _inputs(t_q: int, t_k: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (t_q, h, 576), (t_k, 576), (t_q, h, 512)
    q, kv, grad = (torch.randn(shape).bfloat16() for shape in shapes)
    return q, kv, grad


def _selection(lengths: list[int], t_k: int, topk: int) -> Tensor:
    """Rows of so many keys; the second half of them in two pieces with -1 between."""
    indices = torch.full((len(lengths), topk), -1, dtype=torch.int32)
    for i, length in enumerate(lengths):
        places = torch.arange(length) + (torch.arange(length) > 1) * (2 * i >= len(lengths))
        places = places[places < topk]
        indices[i, places] = torch.randperm(t_k)[: len(places)].sort().values.int()
    return indices


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("lengths", "t_k", "topk"),
    [([0, 1, 5, 3, 6, 0], 9, 7), ([2, 1], 40, 2), ([], 3, 2), ([0, 0], 3, 0), ([0, 0], 0, 3)],
)
def test_the_backward_is_handed_to_the_frontend(
    backend: Any, lengths: list[int], t_k: int, topk: int
) -> None:
    q, kv, grad = _inputs(len(lengths), t_k, 33)
    indices = _selection(lengths, t_k, topk)
    expected = _attend(torch_backend.sparse_mla, q, kv, indices, grad)
    _assert_close(_attend(backend.sparse_mla, q, kv, indices, grad), expected)


def test_slices_and_strides_are_copied_to_what_the_frontend_takes(backend: Any) -> None:
    q, kv, grad = _inputs(3, 9, 33)
    indices = _selection([3, 1, 3, 2], 9, 3)[1:]
    assert indices.is_contiguous() and indices.data_ptr() % 16
    expected = _attend(torch_backend.sparse_mla, q, kv, indices, grad)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, kv, indices, grad)]
    assert not any(x.is_contiguous() for x in turned)
    for arguments in ((q, kv, indices, grad), turned):
        _assert_close(_attend(backend.sparse_mla, *arguments), expected)


@pytest.mark.parametrize(
    ("h", "expected"),
    [(1, "HopperKernels"), (8, "HopperKernels"), (32, "HopperKernels"), (33, "CudnnKernels"),
     (64, "CudnnKernels"), (128, "CudnnKernels")],
)  # fmt: skip
def test_queries_that_share_tiles_take_our_backward(
    backend: Any, h: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "attend_with", lambda kernels, *_: type(kernels).__name__)
    q, kv, _ = _inputs(2, 3, h)
    assert backend.sparse_mla(q, kv, torch.zeros(2, 1, dtype=torch.int32), 1, 512) == expected


def test_the_rest_is_the_triton_backends(backend: Any) -> None:
    ours = get_backend("triton")
    assert backend.select_topk is ours.select_topk
    assert backend.indexer_kl is ours.indexer_kl
    assert backend.indexer_kl_dense is ours.indexer_kl_dense


def test_what_the_kernel_does_not_take_is_refused(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, kv, _ = _inputs(2, 3, 64)
    indices = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(BackendError, match=r'(?s)same bits.*use the backend "triton"'):
        backend.sparse_mla(q, kv, indices, SCALE, 512, deterministic=True)
    with pytest.raises(BackendError, match="same bits"):
        backend.sparse_mla_with_mass(q, kv, indices, SCALE, 512, deterministic=True)
    with pytest.raises(BackendError, match=r"(?s)float32.*bfloat16.*remedy"):
        backend.sparse_mla(q.float(), kv.float(), indices, SCALE, 512)
    with pytest.raises(BackendError, match=r"(?s)d_v 500.*d_v 512"):
        backend.sparse_mla(q, kv, indices, SCALE, 500)
    with pytest.raises(BackendError, match=r"(?s)d_qk 512.*d_qk 576"):
        backend.sparse_mla(q[..., :512], kv[:, :512], indices, SCALE, 512)
    with pytest.raises(BackendError, match="fit together"):
        backend.sparse_mla(q, kv, indices.long(), SCALE, 512)
    monkeypatch.setattr(backend, "is_hopper", lambda q: False)
    with pytest.raises(BackendError, match=r"(?s)on cpu.*Hopper"):
        backend.sparse_mla(q, kv, indices, SCALE, 512)


def test_a_missing_package_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_hopper(monkeypatch)
    for name in (BACKEND, KERNELS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(
        BackendError, match=r"(?s)cudnn.*cannot run here.*pip install nvidia-cudnn-frontend"
    ):
        get_backend("cudnn")
    report = {status.name: status for status in backend_report()}
    assert "pip install nvidia-cudnn-frontend" in report["cudnn"].reason


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_hopper(monkeypatch, (10, 0))
    with pytest.raises(BackendError, match=r"(?s)cudnn.*\(10, 0\).*Hopper.*\(9, 0\)"):
        get_backend("cudnn")


@pytest.mark.gpu
@needs_cudnn
@pytest.mark.parametrize("h", [2, 16, 33, 64, 128])
def test_bf16_error_is_at_most_twice_that_of_plain_pytorch(h: int) -> None:
    """Empty rows, short rows, rows with holes, more keys than queries, a slice of a selection."""
    get_backend("cudnn")
    from glm5.ops.sparse_mla.autograd import attend_with
    from glm5.ops.sparse_mla.cudnn import CudnnKernels

    lengths, t_k, topk = [9, 0, 1, 2, 63, 64, 65, 127, 128, 129, 300, 301, 0], 400, 301
    q, kv, grad = _inputs(len(lengths) - 1, t_k, h)
    indices = _selection(lengths, t_k, topk)[1:]
    assert indices.data_ptr() % 16
    exact = _attend(oracles.attention, q.double(), kv.double(), indices, grad)
    naive = _attend(oracles.attention, q, kv, indices, grad)
    torch.full((2**26,), torch.nan, device="cuda")  # left behind for the outputs to be written in
    on_gpu = [x.cuda() for x in (q, kv, indices, grad)]
    on_gpu[2] = torch.cat([indices[:1], indices]).cuda()[1:]
    ours = _attend(partial(attend_with, CudnnKernels()), *on_gpu)
    backends = _attend(get_backend("cudnn").sparse_mla, *on_gpu)
    for results in (ours, backends):
        for mine, theirs, true in zip(results, naive, exact, strict=True):
            finite = true.isfinite()
            assert torch.equal(mine.cpu().isfinite(), finite)
            rounding = torch.finfo(torch.bfloat16).eps * true[finite].abs().max()
            mine_off, theirs_off = (
                (x.cpu().double() - true)[finite].abs().max() for x in (mine, theirs)
            )
            assert mine_off <= 2 * theirs_off + rounding


@pytest.mark.gpu
@needs_cudnn
def test_other_lengths_need_no_other_kernel() -> None:
    backend = get_backend("cudnn")
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm90

    caches = [
        value
        for name, value in vars(_interface_sm90.flash_attn_bwd_sm90).items()
        if name.startswith("compile_cache")
    ]
    sizes = []
    for t_q, t_k in ((70, 90), (1, 500), (129, 3)):
        q, kv, grad = (x.cuda() for x in _inputs(t_q, t_k, 64))
        indices = oracles.random_selection(t_q, t_k, 301).cuda()
        ours = _attend(backend.sparse_mla, q, kv, indices, grad)
        triton = _attend(get_backend("triton").sparse_mla, q, kv, indices, grad)
        _assert_close(ours, triton)
        *_, mass = backend.sparse_mla_with_mass(q, kv, indices, SCALE, 512)
        assert torch.equal(
            mass, get_backend("triton").sparse_mla_with_mass(q, kv, indices, SCALE, 512)[2]
        )
        sizes.append([len(cache) for cache in caches])
    assert len(caches) == 3 and sizes[0] == sizes[1] == sizes[2]
