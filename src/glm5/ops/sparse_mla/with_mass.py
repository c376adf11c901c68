"""A forward that also tells how much attention each selected key got from all heads together.

A probability needs the last denominator of its head, which the forward knows at its end only, and
a sum over heads cannot be rescaled. So the forward keeps its probabilities, which it makes anyway,
chunk by chunk of queries, and a second kernel adds them up.
"""

import torch
from torch import Tensor

from glm5.ops.devices import num_processors
from glm5.ops.sparse_mla.head_sums import sum_over_heads
from glm5.ops.sparse_mla.kernels import Kernels
from glm5.ops.sparse_mla.selection import Selection
from glm5.ops.sparse_mla.tile_probs import PROB_BYTES, TileProbs, TileShape, bytes_per_row


def forward_with_mass(
    kernels: Kernels,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    selection: Selection,
    softmax_scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels.forward, -> out, lse, and mass [t_q, topk] fp32, the same bits every time.

    mass[i, n] is the sum over the heads of query i of their probability of the key
    topk_indices[i, n], and 0 where that is -1. topk_indices [t_q, topk] int32, of which kernels
    made selection. Up to PROB_BYTES of temporary memory.
    """
    mass = torch.empty(topk_indices.shape, dtype=torch.float32, device=q.device)
    if mass.numel() == 0:
        return *kernels.forward(q, kv, selection, softmax_scale, d_v), mass
    out = q.new_empty(*q.shape[:2], d_v)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    num_rows, width = selection.indices.shape
    shape = kernels.tile_shape(q, d_v)
    heads_per_row = q.shape[1] * selection.queries_per_row
    chunk = min(num_rows, _chunk(q, heads_per_row, width, shape))
    kept = TileProbs.empty(q, chunk, heads_per_row, width, shape)
    for first in range(0, num_rows, chunk):
        some = slice(first, first + chunk)
        part, queries = selection.rows(some), selection.queries(some)
        of_part = kept.first(len(part.lengths))
        some_out, some_lse = out[queries], lse[queries]
        kernels.forward_into(q[queries], kv, part, softmax_scale, some_out, some_lse, of_part)
        sum_over_heads(of_part, some_lse, topk_indices[queries], part, mass[queries])
    return out, lse, mass


def _chunk(q: Tensor, heads_per_row: int, width: int, shape: TileShape) -> int:
    """Rows of the selection whose probabilities keep to the budget; all processors finish them at
    about the same time."""
    most = max(1, PROB_BYTES // bytes_per_row(q, heads_per_row, width, shape))
    processors = num_processors(q)
    return max(most // processors * processors, min(most, processors))
