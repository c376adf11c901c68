"""Which peers are found, and what the adapters hand to them, without a GPU."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.bench import peers
from glm5.bench.peers import FLASH_MLA, Peers, find_peers
from glm5.errors import BackendError
from glm5.ops import torch_backend
from glm5.ops.sparse_mla.selection import Selection

SCALE = 1 / 16
ADAPTER = "glm5.bench.flash_mla"


def test_every_missing_peer_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    found = find_peers()
    assert not (found.sparse_mla or found.select_topk or found.indexer_kl or found.only)
    for name in ("tilelang", "nvidia-cudnn-frontend", "sgl-flash-mla"):
        assert f"pip install {name}" in found.missing.replace("--no-deps ", "")


def test_one_missing_peer_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Peers) -> None:
        raise BackendError("not here")

    def add(found: Peers) -> None:
        found.only["peer"] = "forward"

    monkeypatch.setattr(peers, "_add_megatron", fail)
    monkeypatch.setattr(peers, "_add_cudnn", add)
    monkeypatch.setattr(peers, "_add_flash_mla", fail)
    found = find_peers()
    assert found.only == {"peer": "forward"}
    assert found.missing.count("not here") == 2


def _flash_mla(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, topk_length: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashMLA's signature and demands: out, the largest logit, lse."""
    assert q.shape[1] in (64, 128) and kv.shape[1:] == (1, 576) and d_v == 512
    assert indices.shape[1] == 1 and indices.shape[2] % 128 == 0
    chosen = indices[:, 0].where(torch.arange(indices.shape[2]) < topk_length[:, None], -1)
    out, lse = torch_backend.sparse_mla(q, kv[:, 0], chosen, scale, d_v)
    return out, lse, lse


def _sgl_flash_mla(*args: Any, topk_length: Tensor, use_legacy: bool = False) -> Any:
    assert use_legacy, "its other kernels are not for Hopper"
    return _flash_mla(*args, topk_length)


@pytest.mark.parametrize("function", [_flash_mla, _sgl_flash_mla])
@pytest.mark.parametrize("h", [8, 64, 65])
def test_flash_mla_gets_the_heads_that_it_takes(
    function: Callable[..., Any], h: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("flash_mla")
    package.flash_mla_sparse_fwd = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    found = Peers()
    peers._add_flash_mla(found)
    try:
        assert found.only == {FLASH_MLA: "forward"}
        q, kv = torch.randn(3, h, 576).bfloat16(), torch.randn(9, 576).bfloat16()
        indices = torch.full((3, 128), -1, dtype=torch.int32)
        indices[:, :2] = torch.tensor([2, 7])
        # What stands after a row's length is not read.
        unread = indices.clone()
        unread[1, 2] = 5
        selection = Selection(unread, torch.tensor([2, 2, 2], dtype=torch.int32))
        out, lse = sys.modules[ADAPTER].flash_mla_fwd(q, kv, selection, SCALE, 512)
    finally:
        del sys.modules[ADAPTER]
    expected = torch_backend.sparse_mla(q, kv, indices, SCALE, 512)
    assert out.is_contiguous() and lse.is_contiguous()
    torch.testing.assert_close((out, lse), expected)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_mla") is None, reason="needs flash_mla")
def test_flash_mla_agrees_with_our_forward() -> None:
    from glm5.bench.selections import random_causal
    from glm5.ops.backends import get_backend

    found = find_peers()
    for h in (8, 64):
        q, kv = (torch.randn(s, device="cuda").bfloat16() for s in ((300, h, 576), (300, 576)))
        indices = random_causal(300, 300, 128)
        ours = get_backend("triton").sparse_mla(q, kv, indices, SCALE, 512)
        theirs = found.sparse_mla[FLASH_MLA](q, kv, indices, SCALE, 512)
        for x, y in zip(theirs, ours, strict=True):
            assert (x.float() - y.float()).norm() <= 1e-2 * y.float().norm()
