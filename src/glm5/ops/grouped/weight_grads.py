"""The gradients of the weights of all groups, where they are trained."""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.ops.devices import is_hopper
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_sums import row_sums
from glm5.ops.grouped.triton_tiles import RowTiles

# Sums of several chunks would take as much fp32 memory as the weight: only of huge groups.
_CHUNK = 2**20


def weight_grads(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad_g^T x_g of each group, summed in fp32 -> [n, out, in] in the dtype of x.

    grad [t, out], x [t, in], contiguous. PyTorch's grouped product where it takes the tensors: bf16
    on Hopper, rows of whole 16 bytes (measured faster than ours); else Triton.
    """
    if is_hopper(x) and _torch_takes(grad, x):
        return F.grouped_mm(grad.t(), x, offs=ends)
    num_in = x.shape[1]
    out = x.new_empty(len(ends), grad.shape[1], num_in)
    chunks = RowTiles.of(ends, len(x), _CHUNK, keep_empty=True)
    row_sums(grad, x, Factors((out,), (num_in,), (0,), (1.0,), num_in), chunks, is_a=False)
    return out


def _torch_takes(grad: Tensor, x: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and len(x) > 0
        and all(y.shape[1] % 8 == 0 and y.data_ptr() % 16 == 0 for y in (grad, x))
    )
