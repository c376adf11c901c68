"""Index scores of each query's keys, their divergence from the attention, and its gradient."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.indexer_kl.triton_keys import KeyRows, index_sizes, is_small_tile, load_keys


@triton.jit
def _divergence_kernel(
    q_ptr, k_ptr, weights_ptr, indices_ptr, starts_ptr, num_keys_ptr, width,
    mass_ptr, grad_scores_ptr, kl_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, IS_LISTED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    num_keys = tl.load(num_keys_ptr + row)
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head, is_dim = heads < NUM_HEADS, (dims < HEAD_DIM)[None, :]
    q_places = q_ptr + (row * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(q_places, mask=is_head[:, None] & is_dim, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    weights = tl.load(weights_ptr + row * NUM_HEADS + heads, mask=is_head, other=0.0)
    # The gradient's place holds the scores until their softmax is known.
    mass_row, scores_row = mass_ptr + row * width, grad_scores_ptr + row * width
    peak, total, mass = float("-inf"), 0.0, 0.0
    for start in tl.range(0, num_keys, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        keys = load_keys(indices_ptr, starts_ptr, row, columns, num_keys, width, IS_LISTED)
        k_places = k_ptr + keys.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_places, mask=(keys >= 0)[:, None] & is_dim, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        similarity = tl.dot(k, tl.trans(q), input_precision="ieee")
        similarity = tl.maximum(similarity, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores = tl.sum(similarity * weights[None, :], 1)
        scores = tl.where(keys >= 0, scores, float("-inf"))
        tl.store(scores_row + columns, scores, mask=columns < num_keys)
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        # A tile without keys leaves the peak at -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(scores - shift), 0)
        peak = new_peak
        mass += tl.sum(tl.load(mass_row + columns, mask=columns < num_keys, other=0.0), 0)
    # Other threads of this program read the scores next.
    tl.debug_barrier()
    log_total = peak + tl.log(total)
    mass = tl.where(mass == 0.0, 1.0, mass)
    kl = 0.0
    for start in tl.range(0, num_keys, BLOCK_W):
        columns = start + tl.arange(0, BLOCK_W)
        inside = columns < num_keys
        log_q = tl.load(scores_row + columns, mask=inside, other=float("-inf")) - log_total
        p = tl.load(mass_row + columns, mask=inside, other=0.0) / mass
        # A NaN in p has to reach the loss.
        terms = tl.where(p == 0.0, 0.0, p * (tl.log(tl.where(p == 0.0, 1.0, p)) - log_q))
        kl += tl.sum(terms, 0)
        tl.store(scores_row + columns, tl.exp(log_q) - p, mask=inside)
    tl.store(kl_ptr + row, kl)


def divergence(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    keys: KeyRows,
    mass: Tensor,
    grad_scores: Tensor,
    kl: Tensor,
) -> None:
    """kl[i] = sum_n p log(p / softmax(s)), p = mass[i] / sum(mass[i]), s the index scores of row i.

    q [t_q, h_i, d_i], k [t_k, d_i] one float dtype, weights [t_q, h_i] fp32, mass
    [t_q, keys.width] fp32, all contiguous. Written: grad_scores [t_q, keys.width] fp32, the
    gradient of kl in the scores: softmax(s) - p; kl [t_q] fp32, 0 for a row without keys.
    """
    if len(q):
        _divergence_kernel[(len(q),)](
            q, k, weights, *keys.kernel_arguments(), mass, grad_scores, kl,
            IS_LISTED=keys.indices is not None, **launch_options(q),
        )  # fmt: skip


def launch_options(q: Tensor) -> dict[str, Any]:
    """Sizes and tiles for q [t_q, h_i, d_i]."""
    small = is_small_tile(q)
    return {
        **index_sizes(q),
        "BLOCK_N": 32 if small else 64,
        "BLOCK_W": 1024,
        "num_warps": 4 if small else 2,
        "num_stages": 1 if small else 3,
    }
