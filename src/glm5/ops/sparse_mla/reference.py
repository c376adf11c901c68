"""Portable sparse attention: chunked over query rows, deterministic, forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.key_sets import KeySelection, rows_per_chunk
from glm5.ops.precision import accumulation_dtype, no_autocast
from glm5.ops.sparse_mla.chunk import attend, attend_backward
from glm5.ops.sparse_mla.inputs import check_inputs


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over selected keys: softmax(softmax_scale q . kv[s]) kv[s, :d_v], s selected.

    (arXiv 2512.02556, eq. 2.) q [t_q, h, d_qk], kv [t_k, d_qk] one latent head shared by the
    heads, both of one float dtype; topk_indices [t_q, topk] int32, each key once, -1 = none
    -> out [t_q, h, d_v] in q's dtype, lse [t_q, h] fp32, the natural log of the sum of exp(logits)
    (fp64 for fp64 q). A row of all -1 gives out = 0, lse = -inf and zero gradients.
    Differentiable in q and kv, not through lse; computed in fp32 (fp64 for fp64 q). Each chunk
    multiplies all keys between the lowest and the highest selected ones, so kv must be finite.
    Its sums have one order, so the same inputs always give the same bits, deterministic or not.
    Memory is bounded by a chunk; one host sync per forward and per backward.
    Raises BackendError for inputs that do not fit and for indices beyond kv.
    """
    del deterministic
    check_inputs(q, kv, topk_indices, d_v)
    out, lse, _ = _SparseMlaFunction.apply(False, q, kv, topk_indices, softmax_scale, d_v)
    return out, lse


def sparse_mla_with_mass(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """As sparse_mla, and -> mass [t_q, topk] fp32 (fp64 for fp64 q), without gradient.

    mass[i, n] is how much attention query i gives to the key topk_indices[i, n], summed over its
    heads: at most their number; 0 where there is no key. It is what trains the indexer.
    """
    del deterministic
    check_inputs(q, kv, topk_indices, d_v)
    return _SparseMlaFunction.apply(True, q, kv, topk_indices, softmax_scale, d_v)


class _SparseMlaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        with_mass: bool,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        d_v: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        selection, dtype = KeySelection(topk_indices), accumulation_dtype(q)
        out = q.new_zeros(*q.shape[:2], d_v)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
        mass = lse.new_zeros(topk_indices.shape) if with_mass else None
        with no_autocast(q):
            keys_and_values = kv.to(dtype)
            for chunk in selection.chunks(len(kv), _num_rows(q, kv, topk_indices)):
                rows, keys = chunk
                q_rows = q[rows].to(dtype) * softmax_scale
                out[rows], lse[rows], probs = attend(
                    q_rows, keys_and_values[keys], selection.mask(chunk), d_v
                )
                if mass is not None:
                    mass[rows] = selection.by_entry(probs.sum(1), chunk)
                del probs  # the next chunk needs the memory
        ctx.softmax_scale = softmax_scale
        ctx.save_for_backward(q, kv, topk_indices, out, lse)
        ctx.mark_non_differentiable(*(x for x in (lse, mass) if x is not None))
        return out, lse, mass

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor, _grad_lse: Tensor, _grad_mass: Tensor | None
    ) -> tuple[None, Tensor, Tensor, None, None, None]:
        q, kv, topk_indices, out, lse = ctx.saved_tensors
        selection, dtype = KeySelection(topk_indices), accumulation_dtype(q)
        grad_q, grad_kv = torch.zeros_like(q), torch.zeros_like(kv, dtype=dtype)
        with no_autocast(q):
            keys_and_values = kv.to(dtype)
            for chunk in selection.chunks(len(kv), _num_rows(q, kv, topk_indices)):
                rows, keys = chunk
                grad_q_rows = attend_backward(
                    grad_out[rows].to(dtype),
                    out[rows].to(dtype),
                    lse[rows],
                    q[rows].to(dtype) * ctx.softmax_scale,
                    keys_and_values[keys],
                    selection.mask(chunk),
                    grad_kv[keys],
                )
                grad_q[rows] = grad_q_rows * ctx.softmax_scale
        return None, grad_q, grad_kv.to(kv.dtype), None, None, None


def _num_rows(q: Tensor, kv: Tensor, topk_indices: Tensor) -> int:
    """Query rows per chunk: two sets of logits, the mask, and the rows themselves."""
    element_size, h, d_qk = accumulation_dtype(q).itemsize, q.shape[1], q.shape[2]
    logits_bytes = 2 * h * len(kv) * element_size
    mask_bytes = 3 * len(kv) + 24 * topk_indices.shape[1]
    return rows_per_chunk(logits_bytes + mask_bytes + 6 * h * d_qk * element_size)
