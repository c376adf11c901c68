"""Forward of sparse_mla in plain Triton: any size and dtype, one program per token and heads."""

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.sparse_mla.portable_tiles import PortableTiles
from glm5.ops.sparse_mla.selection import Selection
from glm5.ops.sparse_mla.tile_probs import TileProbs, TileShape


@triton.jit(do_not_specialize=["num_tiles"])
def _sparse_mla_fwd_kernel(
    q,
    kv,
    topk_indices,
    lengths,
    out,
    lse,
    scale_log2,
    num_heads,
    topk,
    kept_probs,
    kept_maxima,
    num_tiles,
    d_qk: tl.constexpr,
    d_v: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UPCAST: tl.constexpr,
    KEEPS: tl.constexpr,
):
    # The last tokens have the most keys under a causal mask: they go first, for an even finish.
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_v, in_tail = tl.arange(0, BLOCK_V), d_v + tl.arange(0, BLOCK_T)
    q_rows = q + (token * num_heads + heads[:, None]) * d_qk
    is_head = heads[:, None] < num_heads
    q_v = tl.load(q_rows + in_v[None, :], mask=is_head & (in_v[None, :] < d_v), other=0.0)
    q_tail = tl.load(q_rows + in_tail[None, :], mask=is_head & (in_tail[None, :] < d_qk), other=0.0)
    if UPCAST:
        q_v, q_tail = q_v.to(tl.float32), q_tail.to(tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    length = tl.load(lengths + token)
    for start in range(0, length, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        keys = tl.load(topk_indices + token * topk + columns, mask=columns < length, other=-1)
        valid = keys >= 0
        kv_rows = kv + keys.to(tl.int64)[:, None] * d_qk
        k_v = tl.load(
            kv_rows + in_v[None, :], mask=valid[:, None] & (in_v[None, :] < d_v), other=0.0
        )
        k_tail = tl.load(
            kv_rows + in_tail[None, :], mask=valid[:, None] & (in_tail[None, :] < d_qk), other=0.0
        )
        if UPCAST:
            k_v, k_tail = k_v.to(tl.float32), k_tail.to(tl.float32)
        logits = tl.dot(q_v, tl.trans(k_v), input_precision="ieee")
        if d_qk > d_v:
            logits += tl.dot(q_tail, tl.trans(k_tail), input_precision="ieee")
        logits = tl.where(valid[None, :], logits * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # A tile without keys leaves the maximum at -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(logits - shift[:, None])
        if KEEPS:
            part = token * tl.num_programs(1) + tl.program_id(1)
            kept_rows = (part * num_tiles + start // BLOCK_N) * BLOCK_H + tl.arange(0, BLOCK_H)
            kept_places = kept_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(kept_maxima + kept_rows, new_max)
            tl.store(kept_probs + kept_places, probs.to(kept_probs.dtype.element_ty))
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = acc * rescale[:, None]
        acc += tl.dot(probs.to(k_v.dtype), k_v, input_precision="ieee")
        row_max = new_max
    # NaN has to reach the log-sum-exp.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    out_rows = out + (token * num_heads + heads[:, None]) * d_v
    tl.store(
        out_rows + in_v[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_head & (in_v[None, :] < d_v),
    )
    ln_2: tl.constexpr = 0.6931471805599453
    tl.store(
        lse + token * num_heads + heads,
        (row_max + tl.log2(row_sum)) * ln_2,
        mask=heads < num_heads,
    )


def sparse_mla_fwd_into(
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    kept: TileProbs | None,
) -> None:
    """out = softmax(softmax_scale q . kv[s]) kv[s, :d_v] over the selected keys s, and its lse.

    q [t_q, h, d_qk], kv [t_k, d_qk] one float dtype, selection one_by_one. Written: out
    [t_q, h, d_v] in q's dtype, lse [t_q, h] fp32, and the probabilities to kept, where it is given:
    it has as many rows as the selection, and tiles of tile_shape. All contiguous.
    """
    h, d_qk = q.shape[1:]
    if out.numel() == 0:
        return
    d_v = out.shape[2]
    probs, maxima = (out, lse) if kept is None else kept
    tiles = PortableTiles.forward(q, d_v)
    _sparse_mla_fwd_kernel[(len(q), triton.cdiv(h, tiles.heads))](
        q,
        kv,
        selection.indices,
        selection.lengths,
        out,
        lse,
        softmax_scale * 1.4426950408889634,
        h,
        selection.indices.shape[1],
        probs,
        maxima,
        0 if kept is None else maxima.shape[2],
        d_qk=d_qk,
        d_v=d_v,
        KEEPS=kept is not None,
        **tiles.launch_options(),
    )


def tile_shape(q: Tensor, d_v: int) -> TileShape:
    """Of what sparse_mla_fwd_into keeps of q [t_q, h, d_qk]."""
    tiles = PortableTiles.forward(q, d_v)
    return TileShape(tiles.heads, tiles.keys)
