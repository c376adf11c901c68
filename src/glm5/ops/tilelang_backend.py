"""Backend "tilelang": the TileLang kernels that Megatron-Core ships, padded to sizes they take.

bf16 only. Memory is bounded by blocks of query rows. Megatron-Core runs the attention's forward
again in its backward. Its kernels have no dense form of the indexer's loss.
"""

import math
from typing import Any

import tilelang  # noqa: F401  (Megatron-Core hides that it is missing; the caller must see it)
import torch
from megatron.core.transformer.experimental_attention_variant.ops.indexer import lighting_indexer
from megatron.core.transformer.experimental_attention_variant.ops.sparse_mla import SparseMLA
from megatron.core.transformer.experimental_attention_variant.ops.tilelang_indexer_fwd import (
    indexer_fwd_interface,
)
from megatron.core.transformer.experimental_attention_variant.ops.tilelang_indexer_loss import (
    sparse_indexer_target_interface,
)
from torch import Tensor
from torch.nn.functional import pad

from glm5.errors import BackendError
from glm5.ops.indexer.inputs import check_index_inputs
from glm5.ops.indexer.selection import select_from_scores
from glm5.ops.indexer_kl.inputs import check_sparse_inputs
from glm5.ops.indexer_kl.mcore import kl_per_row
from glm5.ops.sparse_mla.inputs import attend_to_nothing, check_inputs

__all__ = ["indexer_kl", "indexer_kl_dense", "select_topk", "sparse_mla", "sparse_mla_with_mass"]

# The one size of Megatron-Core's attention kernels; smaller ones are padded with zeros.
_D_V, _D_TAIL = 512, 64
_MAX_HEADS, _MAX_INDEX_HEADS = 128, 64
# Budget for the fp32 scores of one block of query rows; selecting makes copies of them.
_SCORE_BYTES = 64 * 2**20


@torch.no_grad()
def select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    """Select by Megatron-Core's fused index scores, with the tie rule of select_from_scores.

    q [t_q, h_i, d_i], k [t_k, d_i] bf16, weights [t_q, h_i] fp32, starts, ends [t_q] int32
    -> topk_indices [t_q, topk] int32, ascending key position, -1 only at the tail.
    Raises BackendError for shapes that do not fit, other dtypes, and more than 64 heads.
    """
    check_index_inputs(q, k, weights, starts, ends, topk)
    _check_bf16(q=q, k=k)
    topk_indices = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    if len(q) == 0 or len(k) == 0 or topk == 0:
        return topk_indices
    q, k, weights = _pad_index(q, k, weights)
    starts, ends = starts.int().contiguous(), ends.int().contiguous()
    for rows in _blocks(len(q), len(k)):
        bounds = starts[rows], ends[rows]
        scores = indexer_fwd_interface(q[rows], k, weights[rows], *bounds, clean_logits=False)
        topk_indices[rows] = select_from_scores(scores, *bounds, topk)
    return topk_indices


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over selected keys by Megatron-Core's fused kernels.

    q [t_q, h, d_qk], kv [t_k, d_qk] bf16, topk_indices [t_q, topk] int32, -1 = none
    -> out [t_q, h, d_v] bf16, lse [t_q, h] fp32 natural log, without gradient.
    A row of all -1 gives out = 0, lse = -inf. Differentiable in q and kv.
    Raises BackendError for shapes that do not fit, other dtypes, more than 128 heads, d_v above
    512 and d_qk - d_v above 64, and when deterministic: the gradient of kv is summed by atomics.
    """
    if deterministic:
        raise BackendError(
            "the tilelang backend cannot give the same bits every time",
            got="deterministic attention",
            remedy='use the backend "triton"',
        )
    check_inputs(q, kv, topk_indices, d_v)
    _check_bf16(q=q, kv=kv)
    _check_sizes(q.shape[1], q.shape[2], d_v)
    if len(q) == 0 or len(kv) == 0 or topk_indices.shape[1] == 0:
        return attend_to_nothing(q, kv, d_v)
    num_heads = q.shape[1]
    wide_q = pad(_pad_latent(q, d_v), (0, 0, 0, _padded_heads(num_heads) - num_heads))
    out, lse_log2 = SparseMLA.apply(
        wide_q, _pad_latent(kv, d_v)[:, None], topk_indices[:, None], softmax_scale
    )
    lse = lse_log2.detach()[:, :num_heads] * math.log(2)
    # Megatron-Core gives rows without a key a log-sum-exp of 0.
    lse = lse.masked_fill((topk_indices < 0).all(1, keepdim=True), -torch.inf)
    return out[:, :num_heads, :d_v], lse


def sparse_mla_with_mass(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    d_v: int,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As sparse_mla, and -> mass [t_q, topk] fp32 without gradient: the attention over all heads.

    Megatron-Core's attention does not give its probabilities away: its kernel for the indexer's
    target multiplies queries and keys again, and computes the log-sum-exp again.
    """
    out, lse = sparse_mla(q, kv, topk_indices, softmax_scale, d_v, deterministic=deterministic)
    mass = torch.zeros(topk_indices.shape, device=q.device)
    if mass.numel() == 0 or len(kv) == 0:
        return out, lse, mass
    q, kv = (_pad_last(x, 16).detach() for x in (q, kv))
    indices = _pad_indices(topk_indices)
    for rows in _blocks(len(q), len(kv)):
        of_rows = sparse_indexer_target_interface(q[rows], kv, indices[rows], softmax_scale)
        mass[rows] = of_rows[:, : topk_indices.shape[1]]
    return out, lse, mass


def indexer_kl(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, topk_indices: Tensor, mass: Tensor
) -> Tensor:
    """KL(p || softmax(index scores)) over topk_indices, the scores by Megatron-Core.

    Tensors as in the reference, index_q and index_k bf16 -> kl [t_q] fp32, differentiable in the
    index tensors.
    Raises BackendError for shapes that do not fit, other dtypes, and more than 64 index heads.
    """
    check_sparse_inputs(index_q, index_k, index_weights, topk_indices, mass)
    _check_bf16(index_q=index_q, index_k=index_k)
    if topk_indices.numel() == 0 or len(index_k) == 0:
        empty = (x[..., :0].sum().float() for x in (index_q, index_k, index_weights))
        return sum(empty, index_weights.new_zeros(len(index_q), dtype=torch.float32))
    index_q, index_k, index_weights = _pad_index(index_q, index_k, index_weights)
    indices = _pad_indices(topk_indices)
    mass = pad(mass.detach(), (0, indices.shape[1] - mass.shape[1]))
    everything = indices.new_zeros(len(index_q)), indices.new_full((len(index_q),), len(index_k))
    parts = []
    for rows in _blocks(len(index_q), len(index_k)):
        scores, _ = lighting_indexer(
            index_q[rows], index_k, index_weights[rows], everything[0][rows], everything[1][rows],
            indices.shape[1], topk_indices=indices[rows],
        )  # fmt: skip
        parts.append(kl_per_row(mass[rows], scores, indices[rows] >= 0))
    return torch.cat(parts)


def indexer_kl_dense(*_: Any, **__: Any) -> Tensor:
    """Megatron-Core has no kernels for it: raises BackendError."""
    raise BackendError(
        "the tilelang backend has no dense form of the indexer's loss",
        got="all keys of each query",
        expected="the selected keys, of indexer_kl",
        remedy='use the backend "triton" or "torch" for the dense warm-up',
    )


def _blocks(num_rows: int, num_keys: int) -> list[slice]:
    size = max(1, _SCORE_BYTES // (4 * num_keys))
    return [slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]


def _pad_index(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros up to a power of two of at least 8 heads, and to a multiple of 64 dimensions."""
    num_heads = q.shape[1]
    more = max(8, 2 ** (num_heads - 1).bit_length()) - num_heads
    if num_heads > _MAX_INDEX_HEADS:
        raise BackendError(
            "the tilelang backend does not take so many index heads",
            got=num_heads,
            expected=f"at most {_MAX_INDEX_HEADS}",
            remedy='use the backend "triton"',
        )
    q = pad(_pad_last(q, 64), (0, 0, 0, more)).contiguous()
    return q, _pad_last(k, 64).contiguous(), pad(weights.float(), (0, more)).contiguous()


def _pad_indices(topk_indices: Tensor) -> Tensor:
    """[t_q, topk] -> [t_q, a multiple of 64], -1 behind the entries."""
    return pad(topk_indices, (0, -topk_indices.shape[1] % 64), value=-1)


def _pad_last(x: Tensor, unit: int) -> Tensor:
    return pad(x, (0, -x.shape[-1] % unit)).contiguous()


def _pad_latent(x: Tensor, d_v: int) -> Tensor:
    """[..., d_qk] -> [..., 576]: the value part in the first 512, the rest behind it."""
    if x.shape[-1] == _D_V + _D_TAIL and d_v == _D_V:
        return x.contiguous()
    value, tail = x[..., :d_v], x[..., d_v:]
    wide = pad(value, (0, _D_V - d_v)), pad(tail, (0, _D_TAIL - tail.shape[-1]))
    return torch.cat(wide, dim=-1).contiguous()


def _padded_heads(num_heads: int) -> int:
    return max(16, 2 ** (num_heads - 1).bit_length())


def _check_sizes(num_heads: int, d_qk: int, d_v: int) -> None:
    if num_heads > _MAX_HEADS or d_v > _D_V or d_qk - d_v > _D_TAIL:
        raise BackendError(
            "the tilelang backend does not take these sizes",
            got=f"{num_heads} heads, d_qk {d_qk}, d_v {d_v}",
            expected=f"at most {_MAX_HEADS} heads, d_v {_D_V}, and {_D_TAIL} more in d_qk",
            remedy='use the backend "triton"',
        )


def _check_bf16(**tensors: Tensor) -> None:
    got = {name: x.dtype for name, x in tensors.items() if x.dtype != torch.bfloat16}
    if got:
        raise BackendError(
            "the tilelang backend computes in bf16 only",
            got=got,
            expected=torch.bfloat16,
            remedy='set model.dtype to bfloat16, or use the backend "triton"',
        )
