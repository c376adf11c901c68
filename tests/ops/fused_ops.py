"""Every fused operation once, forward and backward, on sizes that the caller chooses."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from glm5.ops.block_scaled import quantise
from glm5.ops.grouped import GroupedPair
from glm5.ops.grouped.gated import weighted_swiglu
from glm5.ops.grouped.linear import grouped_linear
from glm5.ops.indexer.triton_select import select_topk
from glm5.ops.indexer_kl.autograd import indexer_kl, indexer_kl_dense
from glm5.ops.rms_norm import rms_norm
from glm5.ops.rope import rope_cos_sin
from glm5.ops.rotation import rotate
from glm5.ops.sparse_mla.autograd import sparse_mla, sparse_mla_with_mass
from glm5.ops.token_rows import copy_rows, row_places, sum_rows
from tests.ops import oracles

Run = Callable[[], Any]
# of the Gluon kernels, and of the portable ones
SIZES = ((576, 512), (80, 64))


def fused_ops(t_q: int, t_k: int, topk: int) -> Iterator[tuple[str, Run]]:
    """(name, function) of every kernel's case; tensors are made when a function is called."""
    for d_qk, d_v in SIZES:
        for heads, dtype in ((64, torch.bfloat16), (8, torch.bfloat16), (65, torch.bfloat16)):
            yield from _attention(t_q, t_k, topk, heads, d_qk, d_v, dtype)
    yield from _attention(t_q, t_k, topk, 17, 80, 64, torch.float32)
    for heads, d, dtype in ((32, 128, torch.bfloat16), (3, 24, torch.float32)):
        yield (
            f"select_topk {heads} x {d}",
            lambda h=heads, d=d, dtype=dtype: _select(t_q, t_k, topk, h, d, dtype),
        )
        for dense in (False, True):
            yield (
                f"indexer_kl {heads} x {d}, dense {dense}",
                lambda h=heads, d=d, s=dense: _learn(t_k, topk, h, d, s),
            )
    for width, dtype in ((512, torch.bfloat16), (24, torch.float32)):
        yield f"rms_norm {width} {dtype}", lambda w=width, dtype=dtype: _norm(t_k, w, dtype)
    for heads, width, dtype in ((64, 256, torch.bfloat16), (3, 24, torch.float32)):
        yield (
            f"rotate {heads} x {width} {dtype}",
            lambda h=heads, w=width, dtype=dtype: _turn(t_q, h, w, dtype),
        )
    for width, dtype in ((256, torch.bfloat16), (37, torch.float32)):
        yield (
            f"token rows {width} {dtype}",
            lambda width=width, dtype=dtype: _token_rows(t_k, width, dtype),
        )
    for ranks, dtype in (((), torch.bfloat16), ((16, 16), torch.bfloat16), ((5, 3), torch.float32)):
        yield (
            f"grouped_linear {ranks} {dtype}",
            lambda ranks=ranks, dtype=dtype: _experts(t_k, ranks, dtype),
        )
        for fp8_compute in (False, True):
            yield (
                f"grouped_linear {ranks} {dtype}, frozen, fp8_compute {fp8_compute}",
                lambda r=ranks, dtype=dtype, fp8=fp8_compute: _frozen(t_k, r, dtype, fp8),
            )


def _attention(
    t_q: int, t_k: int, topk: int, heads: int, d_qk: int, d_v: int, dtype: torch.dtype
) -> Iterator[tuple[str, Run]]:
    def run(deterministic: bool) -> None:
        q, kv = _leaf(t_q, heads, d_qk, dtype=dtype), _leaf(t_k, d_qk, dtype=dtype)
        indices = oracles.random_selection(t_q, t_k, topk).cuda()
        out, _ = sparse_mla(q, kv, indices, d_qk**-0.5, d_v, deterministic=deterministic)
        out.backward(torch.randn_like(out))

    def run_with_mass() -> Tensor:
        q, kv = _leaf(t_q, heads, d_qk, dtype=dtype), _leaf(t_k, d_qk, dtype=dtype)
        indices = oracles.random_selection(t_q, t_k, topk).cuda()
        return sparse_mla_with_mass(q, kv, indices, d_qk**-0.5, d_v)[2]

    for deterministic in (False, True):
        name = f"sparse_mla {heads} x {d_qk} {dtype}, deterministic {deterministic}"
        yield name, lambda repeatable=deterministic: run(repeatable)
    yield f"sparse_mla_with_mass {heads} x {d_qk} {dtype}", run_with_mass


def _select(t_q: int, t_k: int, topk: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    ends = torch.randint(0, t_k + 1, (t_q,), device="cuda").int()
    starts = (ends // 3).int()
    q, k = _leaf(t_q, heads, dim, dtype=dtype), _leaf(t_k, dim, dtype=dtype)
    weights = _leaf(t_q, heads, dtype=torch.float32)
    return select_topk(q.detach(), k.detach(), weights.detach(), starts, ends, topk)


def _learn(tokens: int, topk: int, heads: int, dim: int, dense: bool) -> None:
    dtype = torch.bfloat16 if dim == 128 else torch.float32
    index_q, index_k = _leaf(tokens, heads, dim, dtype=dtype), _leaf(tokens, dim, dtype=dtype)
    weights = _leaf(tokens, heads, dtype=torch.float32)
    index = index_q, index_k, weights
    if not dense:
        indices = oracles.random_selection(tokens, tokens, topk).cuda()
        indexer_kl(*index, indices, (indices >= 0).float()).sum().backward()
        return
    d_qk, attention_heads = (576, 64) if dim == 128 else (80, 17)
    q = _leaf(tokens, attention_heads, d_qk, dtype=dtype).detach()
    kv = _leaf(tokens, d_qk, dtype=dtype).detach()
    lse = torch.full((tokens, attention_heads), 9.0, device="cuda")
    bounds = (x.cuda() for x in oracles.causal_bounds(tokens // 3, tokens - tokens // 3))
    indexer_kl_dense(*index, q, kv, lse, d_qk**-0.5, *bounds).sum().backward()


def _norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = _leaf(rows, width, dtype=dtype), _leaf(width, dtype=dtype)
    for trained in (weight, weight.detach()):
        y = rms_norm(x, trained, 1e-5)
        y.backward(torch.randn_like(y))


def _turn(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    x = _leaf(tokens, heads, width, dtype=dtype)
    cos, sin = rope_cos_sin(torch.arange(tokens, device="cuda"), width // 4, 8e6)
    for interleaved in (False, True):
        for first in (False, True):
            y = rotate(x, cos, sin, interleaved=interleaved, first=first)
            y.backward(torch.randn_like(y))


def _experts(rows: int, ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = _leaf(rows, 256, dtype=dtype), _leaf(4, 512, 256, dtype=dtype)
    gate_up = grouped_linear(x, weight, _ends(rows), _pairs(ranks, dtype))
    probs = _leaf(rows, dtype=torch.float32)
    out = weighted_swiglu(gate_up, probs)
    out.backward(torch.randn_like(out))


def _frozen(rows: int, ranks: tuple[int, ...], dtype: torch.dtype, fp8_compute: bool) -> None:
    x, weight = _leaf(rows, 256, dtype=dtype), quantise(torch.randn(4, 512, 256, device="cuda"))
    pairs = _pairs(ranks, dtype)
    y = grouped_linear(x, weight, _ends(rows), pairs, fp8_compute=fp8_compute)
    y.backward(torch.randn_like(y))


def _token_rows(tokens: int, width: int, dtype: torch.dtype) -> None:
    places = row_places(torch.randperm(8 * tokens, device="cuda") % tokens, 8)
    out = sum_rows(copy_rows(_leaf(tokens, width, dtype=dtype), places), places)
    out.backward(torch.randn_like(out))


def _ends(rows: int) -> Tensor:
    return torch.tensor([rows // 3, rows // 3, rows - 1, rows], device="cuda").int()


def _pairs(ranks: tuple[int, ...], dtype: torch.dtype) -> list[GroupedPair]:
    part = 512 // max(1, len(ranks))
    return [
        GroupedPair(_leaf(4, rank, 256, dtype=dtype), _leaf(4, part, rank, dtype=dtype), 0.5)
        for rank in ranks
    ]


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
