"""How much attention each key of a query got from all heads, out of what the forward kept.

One pass over the kept probabilities: no products of queries and keys, no keys at all.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.sparse_mla.selection import Selection
from glm5.ops.sparse_mla.tile_probs import TileProbs

# Entries of topk_indices of one program.
_BLOCK_ENTRIES = 512


@triton.jit
def _places_among(keys, indices, length, STEPS: tl.constexpr):
    """How many of indices[:length], which ascend, are less than each key."""
    places = tl.zeros_like(keys)
    for i in tl.static_range(STEPS):
        further = places + (1 << (STEPS - 1 - i))
        seen = tl.load(indices + further - 1, mask=further <= length, other=2147483647)
        places = tl.where(seen < keys, further, places)
    return places


@triton.jit(do_not_specialize=["width", "num_tiles"])
def _head_sums_kernel(
    probs, maxima, lse, topk_indices, indices, lengths, mass,
    num_heads, topk, width, num_parts, num_tiles,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_ENTRIES: tl.constexpr,
):  # fmt: skip
    log2_e: tl.constexpr = 1.4426950408889634
    query = tl.program_id(0).to(tl.int64)
    item = query // QUERIES
    first_row = (query % QUERIES).to(tl.int32) * num_heads
    length = tl.load(lengths + item)
    first = tl.program_id(1) * BLOCK_ENTRIES
    for start in range(first, tl.minimum(first + BLOCK_ENTRIES, topk), KEYS):
        entries = start + tl.arange(0, KEYS)
        keys = tl.load(topk_indices + query * topk + entries, mask=entries < topk, other=-1)
        if QUERIES == 1:
            # One whole tile, which is read in wide pieces.
            tile, columns, is_kept = start // KEYS, (entries % KEYS)[None, :], start < length
        else:
            places = _places_among(keys, indices + item * width, length, STEPS)
            tile, columns = (places // KEYS)[None, :], (places % KEYS)[None, :]
            is_kept = (keys >= 0)[None, :]
        total = tl.zeros([KEYS], tl.float32)
        for first_head in range(0, num_heads, BLOCK_H):
            heads = first_head + tl.arange(0, BLOCK_H)[:, None]
            is_head = heads < num_heads
            part, row = (first_row + heads) // ROWS, (first_row + heads) % ROWS
            rows = ((item * num_parts + part) * num_tiles + tile) * ROWS + row
            log_sum = tl.load(lse + query * num_heads + heads, mask=is_head, other=0.0)
            # A head without keys has no maximum either, and -inf - -inf would be NaN.
            log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum * log2_e)
            peak = tl.load(maxima + rows, mask=is_head & is_kept, other=float("-inf"))
            kept = tl.load(probs + rows * KEYS + columns, mask=is_head & is_kept, other=0.0)
            total += tl.sum(kept.to(tl.float32) * tl.exp2(peak - log_sum), 0)
        total = tl.where(keys >= 0, total, 0.0)
        tl.store(mass + query * topk + entries, total, mask=entries < topk)


def sum_over_heads(
    kept: TileProbs, lse: Tensor, topk_indices: Tensor, selection: Selection, mass: Tensor
) -> None:
    """mass[i, n] = sum_h exp(logit of query i, head h and the key of its entry n - lse[i, h]).

    kept is what a forward wrote that took selection, made of topk_indices [t_q, topk] int32, and
    gave lse [t_q, h] fp32, all contiguous. Written: mass [t_q, topk] fp32, 0 where there is no key.
    """
    t_q, topk = topk_indices.shape
    if mass.numel():
        _, num_parts, num_tiles, rows, keys = kept.probs.shape
        _head_sums_kernel[(t_q, triton.cdiv(topk, _BLOCK_ENTRIES))](
            kept.probs, kept.maxima, lse, topk_indices, selection.indices, selection.lengths, mass,
            lse.shape[1], topk, selection.indices.shape[1], num_parts, num_tiles,
            QUERIES=selection.queries_per_row, ROWS=rows, KEYS=keys,
            **launch_options(lse.shape[1], selection.queries_per_row * topk),
        )  # fmt: skip


def launch_options(num_heads: int, most_keys: int) -> dict[str, Any]:
    """Tiles for so many heads of a query, and keys of a row of the selection.

    Not the width of this selection, which changes with the number of keys there are.
    """
    return {
        "STEPS": most_keys.bit_length(),
        "BLOCK_H": min(64, triton.next_power_of_2(num_heads)),
        "BLOCK_ENTRIES": _BLOCK_ENTRIES,
        # The heads of a tile are added up within a warp.
        "num_warps": 1,
    }
