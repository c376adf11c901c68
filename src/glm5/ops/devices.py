"""What the kernels ask about a tensor's device."""

import torch
from torch import Tensor


def is_hopper(x: Tensor) -> bool:
    """Whether x is on a GPU of compute capability 9.0."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def num_processors(x: Tensor) -> int:
    """Of the GPU that x is on; 1 for the CPU."""
    if not x.is_cuda:
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count
