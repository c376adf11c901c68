"""Lengths that change every step must not compile kernels every step."""

from typing import Any

import pytest
import torch
import triton

from tests.ops.fused_ops import fused_ops


@pytest.mark.gpu
def test_new_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton knows multiples of 16 from other lengths, and that is all."""
    compiled: list[str] = []

    def note(**info: Any) -> None:
        compiled.append(info["fn"].name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for t_q, t_k in ((64, 160), (37, 151), (64, 151), (37, 160)):
        _run_all(t_q, t_k)
    assert compiled
    compiled.clear()
    for t_q, t_k in ((112, 304), (59, 213), (80, 333), (101, 192)):
        _run_all(t_q, t_k)
    assert not compiled


def _run_all(t_q: int, t_k: int) -> None:
    for _, run in fused_ops(t_q, t_k, topk=70):
        run()
    torch.cuda.synchronize()
