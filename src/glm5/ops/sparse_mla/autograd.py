"""sparse_mla of the backend "triton": autograd around the fused kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.errors import BackendError
from glm5.ops.sparse_mla.choose import choose_kernels
from glm5.ops.sparse_mla.inputs import check_inputs
from glm5.ops.sparse_mla.kernels import Kernels
from glm5.ops.sparse_mla.repeatable import repeatable_bwd
from glm5.ops.sparse_mla.with_mass import forward_with_mass

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over selected keys: softmax(softmax_scale q . kv[s]) kv[s, :d_v], s selected.

    (arXiv 2512.02556, eq. 2.) q [t_q, h, d_qk], kv [t_k, d_qk] one latent head shared by the
    heads, both bf16, fp16 or fp32; topk_indices [t_q, topk] int32, each key once, -1 only at the
    tail, which costs nothing -> out [t_q, h, d_v] in q's dtype, lse [t_q, h] fp32, the natural
    log of the sum of exp(logits). A row of all -1 gives out = 0, lse = -inf and zero gradients.
    Differentiable in q and kv, not through lse. Products take the inputs' dtype and are summed in
    fp32; the gradient of kv is summed by atomics, so its last bits change from run to run, unless
    deterministic: then each query's term is rounded to the inputs' dtype first, which takes more
    time and up to 4.5 GiB.
    No host sync. Indices beyond kv are not checked. Raises BackendError for shapes, dtypes and
    devices that do not fit.
    """
    check_inputs(q, kv, topk_indices, d_v)
    _check_dtype(q)
    kernels = choose_kernels(q, d_v)
    return attend_with(
        kernels, q, kv, topk_indices, softmax_scale, d_v, deterministic=deterministic
    )


def sparse_mla_with_mass(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As sparse_mla, and -> mass [t_q, topk] fp32, without gradient: the attention to each selected
    key, summed over the heads.

    No product is computed twice: mass is made of the forward's own probabilities, which bf16 inputs
    round to bf16. Its bits are the same every time. Up to 0.5 GiB of temporary memory.
    """
    check_inputs(q, kv, topk_indices, d_v)
    _check_dtype(q)
    kernels = choose_kernels(q, d_v)
    return attend_with_mass(
        kernels, q, kv, topk_indices, softmax_scale, d_v, deterministic=deterministic
    )


def _check_dtype(q: Tensor) -> None:
    if q.dtype not in _DTYPES:
        raise BackendError(
            "the triton backend does not compute in this dtype",
            got=q.dtype,
            expected=_DTYPES,
            remedy='use the backend "torch"',
        )


def attend_with(
    kernels: Kernels,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """sparse_mla by these kernels, of inputs that fit together and that the kernels take."""
    arguments = q, kv, topk_indices, softmax_scale, d_v, deterministic
    out, lse, _ = _SparseMlaFunction.apply(kernels, False, *arguments)
    return out, lse


def attend_with_mass(
    kernels: Kernels,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """sparse_mla_with_mass by these kernels, of inputs that fit together and that they take."""
    arguments = q, kv, topk_indices, softmax_scale, d_v, deterministic
    return _SparseMlaFunction.apply(kernels, True, *arguments)


class _SparseMlaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        with_mass: bool,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        d_v: int,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q, kv, topk_indices = q.contiguous(), kv.contiguous(), topk_indices.contiguous()
        selection = kernels.select(topk_indices, q.shape[1], len(kv))
        mass = None
        if with_mass:
            out, lse, mass = forward_with_mass(
                kernels, q, kv, topk_indices, selection, softmax_scale, d_v
            )
        else:
            out, lse = kernels.forward(q, kv, selection, softmax_scale, d_v)
        ctx.mark_non_differentiable(*(x for x in (lse, mass) if x is not None))
        ctx.kernels, ctx.softmax_scale, ctx.deterministic = kernels, softmax_scale, deterministic
        # Not the selection, which is made again: layers that share topk_indices keep them once.
        ctx.save_for_backward(q, kv, topk_indices, out, lse)
        return out, lse, mass

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor, _grad_lse: Tensor, _grad_mass: Tensor | None
    ) -> tuple[None, None, Tensor, Tensor, None, None, None, None]:
        q, kv, topk_indices, out, lse = ctx.saved_tensors
        kernels = ctx.kernels
        selection = kernels.select(topk_indices, q.shape[1], len(kv))
        run = partial(repeatable_bwd, kernels) if ctx.deterministic else kernels.backward
        grad_q, grad_kv = run(grad_out.contiguous(), q, kv, selection, out, lse, ctx.softmax_scale)
        return None, None, grad_q, grad_kv, None, None, None, None
