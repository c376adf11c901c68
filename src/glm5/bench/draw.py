"""Random inputs of the measured cases."""

from collections.abc import Callable

import torch
from torch import Tensor


def draw_from(seed: object) -> Callable[..., Tensor]:
    """Normal bf16 tensors on the GPU; their values follow from the seed and the order of calls."""
    generator = torch.Generator("cuda").manual_seed(sum(str(seed).encode()))
    return lambda *shape: torch.randn(shape, device="cuda", generator=generator).bfloat16()
