"""Backend "cudnn": the triton backend, but the attention's backward is cuDNN's where it is faster.

For the sizes of GLM-5 in bf16 on Hopper: d_qk 576, d_v 512. NVIDIA's kernel gives each query a tile
of 64 rows of its own. So it computes the backward of 33 heads and more; queries of fewer heads
share tiles in the triton backend's kernels, which are several times faster there and compute both
passes. Selecting keys and the indexer's loss are the triton backend's.
"""

import torch
from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.devices import is_hopper
from glm5.ops.sparse_mla.autograd import attend_with, attend_with_mass
from glm5.ops.sparse_mla.cudnn import CudnnKernels
from glm5.ops.sparse_mla.hopper import HopperKernels, queries_per_tile
from glm5.ops.sparse_mla.inputs import check_inputs
from glm5.ops.sparse_mla.kernels import Kernels
from glm5.ops.triton_backend import indexer_kl, indexer_kl_dense, select_topk

__all__ = ["indexer_kl", "indexer_kl_dense", "select_topk", "sparse_mla", "sparse_mla_with_mass"]

_D_QK, _D_V = 576, 512


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over selected keys, as the triton backend's, with cuDNN's backward.

    q [t_q, h, 576], kv [t_k, 576] bf16, topk_indices [t_q, topk] int32, each key once, -1 = none,
    which costs nothing at the tail -> out [t_q, h, 512] bf16, lse [t_q, h] fp32 natural log,
    without gradient. A row of all -1 gives out = 0, lse = -inf and zero gradients. Differentiable
    in q and kv: up to 32 heads by the triton backend's kernels, else by cuDNN's, whose gradient of
    kv is summed by atomics.
    Raises BackendError for shapes that do not fit, other dtypes, other sizes, tensors that are not
    on a Hopper GPU, and when deterministic.
    """
    kernels = _kernels_for(q, kv, topk_indices, d_v, deterministic)
    return attend_with(kernels, q, kv, topk_indices, softmax_scale, d_v)


def sparse_mla_with_mass(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As sparse_mla, and -> mass [t_q, topk] fp32: as the triton backend's, whose forward it is."""
    kernels = _kernels_for(q, kv, topk_indices, d_v, deterministic)
    return attend_with_mass(kernels, q, kv, topk_indices, softmax_scale, d_v)


def _kernels_for(
    q: Tensor, kv: Tensor, topk_indices: Tensor, d_v: int, deterministic: bool
) -> Kernels:
    """The faster pair that takes these inputs; BackendError where none does."""
    if deterministic:
        raise BackendError(
            "the cudnn backend cannot give the same bits every time",
            got="deterministic attention",
            remedy='use the backend "triton"',
        )
    check_inputs(q, kv, topk_indices, d_v)
    _check_kernel_takes(q, d_v)
    shares_tiles = queries_per_tile(q.shape[1]) > 1
    return HopperKernels() if shares_tiles else CudnnKernels()


def _check_kernel_takes(q: Tensor, d_v: int) -> None:
    if (q.dtype, q.shape[2], d_v) != (torch.bfloat16, _D_QK, _D_V) or not is_hopper(q):
        raise BackendError(
            "the cudnn backend does not take these inputs",
            got=f"{q.dtype}, d_qk {q.shape[2]}, d_v {d_v}, on {q.device}",
            expected=f"{torch.bfloat16}, d_qk {_D_QK}, d_v {_D_V}, on a Hopper GPU",
            remedy='set model.dtype to bfloat16, or use the backend "triton"',
        )
