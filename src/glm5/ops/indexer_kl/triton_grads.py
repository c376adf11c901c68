"""Gradients of the index scores of each query's own keys, with the scores' gradient given."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.indexer_kl.triton_keys import KeyRows, index_sizes, is_small_tile, load_keys


@triton.jit
def _score_grads_kernel(
    grad_scores_ptr, grad_kl_ptr, q_ptr, k_ptr, weights_ptr,
    indices_ptr, starts_ptr, num_keys_ptr, width, grad_q_ptr, grad_k_ptr, grad_weights_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, IS_LISTED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    num_keys = tl.load(num_keys_ptr + row)
    grad_kl = tl.load(grad_kl_ptr + row)
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head, is_dim = heads < NUM_HEADS, (dims < HEAD_DIM)[None, :]
    q_places = (row * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_places, mask=is_head[:, None] & is_dim, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    weights = tl.load(weights_ptr + row * NUM_HEADS + heads, mask=is_head, other=0.0)
    grad_q = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    grad_weights = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(0, num_keys, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        keys = load_keys(indices_ptr, starts_ptr, row, columns, num_keys, width, IS_LISTED)
        is_place = (keys >= 0)[:, None] & is_dim
        k_places = keys.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + k_places, mask=is_place, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        grad_scores = tl.load(
            grad_scores_ptr + row * width + columns, mask=columns < num_keys, other=0.0
        )
        grad_scores = (grad_scores * grad_kl)[:, None]
        similarity = tl.dot(k, tl.trans(q), input_precision="ieee")
        is_dead = similarity <= 0.0
        grad_weights += tl.sum(tl.where(is_dead, 0.0, similarity) * grad_scores, 0)
        grad_similarity = tl.where(is_dead, 0.0, grad_scores * weights[None, :]).to(k.dtype)
        grad_q = tl.dot(tl.trans(grad_similarity), k, grad_q, input_precision="ieee")
        grad_k = tl.dot(grad_similarity, q, input_precision="ieee")
        tl.atomic_add(grad_k_ptr + k_places, grad_k, mask=is_place, sem="relaxed")
    tl.store(
        grad_q_ptr + q_places,
        grad_q.to(grad_q_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_dim,
    )
    tl.store(grad_weights_ptr + row * NUM_HEADS + heads, grad_weights, mask=is_head)


def score_grads(
    grad_scores: Tensor,
    grad_kl: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    keys: KeyRows,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_weights: Tensor,
) -> None:
    """Gradients of sum_i grad_kl[i] sum_n grad_scores[i, n] s[i, n], s[i, n] the index scores.

    grad_scores [t_q, keys.width], grad_kl [t_q] fp32, q [t_q, h_i, d_i], k [t_k, d_i] one float
    dtype, weights [t_q, h_i] fp32, all contiguous. Written: grad_q as q, grad_weights as weights.
    Added to by atomics, whose order changes from run to run: grad_k [t_k, d_i] fp32.
    """
    if len(q):
        _score_grads_kernel[(len(q),)](
            grad_scores, grad_kl, q, k, weights, *keys.kernel_arguments(),
            grad_q, grad_k, grad_weights,
            IS_LISTED=keys.indices is not None, **launch_options(q),
        )  # fmt: skip


def launch_options(q: Tensor) -> dict[str, Any]:
    """Sizes and tiles for q [t_q, h_i, d_i]."""
    small = is_small_tile(q)
    return {
        **index_sizes(q),
        "BLOCK_N": 16 if small else 64,
        "num_warps": 4,
        "num_stages": 1 if small else 2,
    }
