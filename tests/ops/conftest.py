"""Shared by the tests of ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so an output that nobody wrote is seen."""

    def poison(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            floating = tensor.is_floating_point()
            return tensor.fill_(torch.nan if floating else torch.iinfo(tensor.dtype).min)

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is one query row."""
    monkeypatch.setattr("glm5.ops.key_sets.CHUNK_BYTES", 1)
