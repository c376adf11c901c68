"""What every test gets: no network, one thread, and a seed of its own."""

import os
import random
import zlib
from pathlib import Path

import pytest

# Read by the Hugging Face libraries when they are first imported, here or in a child process.
os.environ["HF_HUB_OFFLINE"] = "1"
# Small tensors on few cores: more threads only fight each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Without a GPU, Triton's kernels run in its interpreter; read when triton is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_from_test_id(request: pytest.FixtureRequest) -> None:
    """The seed follows from the test's name alone, so order and selection change nothing."""
    import numpy as np
    import torch

    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
