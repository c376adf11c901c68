"""How much attention each key in a range gets from all heads, from the log-sum-exp of its logits.

For the dense warm-up, where no attention over these keys has run that could have kept its
probabilities. One matrix product per key. Nothing has to be rescaled, since the denominators are
known.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.indexer_kl.triton_keys import KeyRows, is_interpreted, padded


@triton.jit
def _attention_mass_kernel(
    q_ptr, kv_ptr, lse_ptr, starts_ptr, num_keys_ptr, width, mass_ptr, scale_log2,
    NUM_HEADS: tl.constexpr, D_QK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    log2_e: tl.constexpr = 1.4426950408889634
    # The last tokens have the most keys under a causal mask: they go first, for an even finish.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    num_keys, first_key = tl.load(num_keys_ptr + row), tl.load(starts_ptr + row)
    dims, tail = tl.arange(0, BLOCK_D), BLOCK_D + tl.arange(0, BLOCK_TAIL)
    is_dim, is_tail = (dims < D_QK)[None, :], (tail < D_QK)[None, :]
    for first_head in tl.range(0, NUM_HEADS, BLOCK_H):
        heads = first_head + tl.arange(0, BLOCK_H)
        is_head = (heads < NUM_HEADS)[:, None]
        q_rows = q_ptr + (row * NUM_HEADS + heads[:, None]) * D_QK
        q = tl.load(q_rows + dims[None, :], mask=is_head & is_dim, other=0.0)
        q_tail = tl.load(q_rows + tail[None, :], mask=is_head & is_tail, other=0.0)
        if UPCAST:
            q, q_tail = q.to(tl.float32), q_tail.to(tl.float32)
        # +inf makes the probability of a head that does not exist 0.
        lse = tl.load(lse_ptr + row * NUM_HEADS + heads, mask=heads < NUM_HEADS, other=float("inf"))
        for start in tl.range(0, num_keys, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            is_key = (columns < num_keys)[:, None]
            kv_rows = kv_ptr + (first_key + columns).to(tl.int64)[:, None] * D_QK
            k = tl.load(kv_rows + dims[None, :], mask=is_key & is_dim, other=0.0)
            k_tail = tl.load(kv_rows + tail[None, :], mask=is_key & is_tail, other=0.0)
            if UPCAST:
                k, k_tail = k.to(tl.float32), k_tail.to(tl.float32)
            # Heads are the columns, so that their sum stays within a warp.
            logits = tl.dot(k, tl.trans(q), input_precision="ieee")
            if D_QK > BLOCK_D:
                logits = tl.dot(k_tail, tl.trans(q_tail), logits, input_precision="ieee")
            probs = tl.exp2(logits * scale_log2 - (lse * log2_e)[None, :])
            total = tl.sum(probs, 1)
            places = mass_ptr + row * width + columns
            if NUM_HEADS > BLOCK_H:
                seen = (columns < num_keys) & (first_head > 0)
                total += tl.load(places, mask=seen, other=0.0)
            tl.store(places, total, mask=columns < num_keys)


def attention_mass(
    q: Tensor, kv: Tensor, lse: Tensor, keys: KeyRows, softmax_scale: float, mass: Tensor
) -> None:
    """mass[i, n] = sum_h exp(softmax_scale q[i, h] . kv[key n of row i] - lse[i, h]).

    q [t_q, h, d_qk], kv [t_k, d_qk] one float dtype, lse [t_q, h] fp32, all contiguous; keys are
    ranges -> mass [t_q, keys.width] fp32, of which only the places of each row are written.
    """
    assert keys.indices is None, "the forward over listed keys gives their mass"
    if len(q):
        _attention_mass_kernel[(len(q),)](
            q, kv, lse, keys.starts, keys.num_keys, keys.width, mass,
            softmax_scale * 1.4426950408889634, **launch_options(q),
        )  # fmt: skip


def launch_options(q: Tensor) -> dict[str, Any]:
    """Sizes and tiles for q [t_q, h, d_qk]."""
    num_heads, d_qk = q.shape[1:]
    block_d = max(16, 2 ** (d_qk.bit_length() - 1))
    # An fp32 product lives in registers, and shared memory holds queries and keys in full width.
    small = q.dtype == torch.float32 or block_d > 512
    return {
        "NUM_HEADS": num_heads,
        "D_QK": d_qk,
        "BLOCK_H": 16 if small else min(64, padded(num_heads)),
        "BLOCK_N": 16 if small else 64,
        "BLOCK_D": block_d,
        "BLOCK_TAIL": padded(d_qk - block_d),
        "UPCAST": is_interpreted(q),
        "num_warps": 4,
        "num_stages": 1 if small else 2,
    }
