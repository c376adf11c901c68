"""Tests that need Megatron-Bridge: `make test-bridge` builds the environment that has it."""

from importlib.util import find_spec

import pytest

from tests.tiny_models import tiny_folder

__all__ = ["tiny_folder"]

collect_ignore_glob = [] if find_spec("megatron.bridge") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_process() -> None:
    """Megatron-Bridge would start NCCL by itself."""
    import torch

    from glm5.runtime.distributed import ensure_distributed

    ensure_distributed(torch.device("cpu"))
