"""What every operation asks of its tensors, and how its errors name them."""

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def are_floats(*tensors: Tensor) -> bool:
    """Whether all hold real floating-point numbers."""
    return all(x.is_floating_point() for x in tensors)


def on_one_device(*tensors: Tensor) -> bool:
    """Whether all are on the same device: products of two devices may raise, or be arbitrary."""
    return len({x.device for x in tensors}) <= 1


def described(**tensors: Tensor) -> str:
    """Each name with its shape, dtype and device."""
    return ", ".join(
        f"{name} {list(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items()
    )
