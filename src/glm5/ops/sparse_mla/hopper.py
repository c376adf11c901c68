"""The Gluon kernels for Hopper, as one pair."""

from torch import Tensor

from glm5.ops.sparse_mla.hopper_bwd import num_head_parts, sparse_mla_bwd, sparse_mla_bwd_rows
from glm5.ops.sparse_mla.hopper_fwd import sparse_mla_fwd_into, tile_shape
from glm5.ops.sparse_mla.kernels import AllocatesResults
from glm5.ops.sparse_mla.selection import Selection, one_by_one, unions

# A tile has 64 rows: of one query's heads, or of few heads of several queries. More queries share
# less of their keys.
_ROWS = 64
_MOST_QUERIES = 16


def queries_per_tile(h: int) -> int:
    """How many neighbouring queries of h heads share a tile."""
    return min(_MOST_QUERIES, max(1, _ROWS // h))


class HopperKernels(AllocatesResults):
    """Gluon: bf16, d_qk 576, d_v 512, any number of heads."""

    @staticmethod
    def select(topk_indices: Tensor, h: int, num_keys: int) -> Selection:
        """Neighbouring queries together where their heads fill one tile."""
        together = queries_per_tile(h)
        if together == 1 or not num_keys:
            return one_by_one(topk_indices)
        return unions(topk_indices, num_keys, together)

    forward_into = staticmethod(sparse_mla_fwd_into)
    tile_shape = staticmethod(tile_shape)
    backward = staticmethod(sparse_mla_bwd)
    backward_rows = staticmethod(sparse_mla_bwd_rows)
    num_row_parts = staticmethod(num_head_parts)
    shuffles_rows = True
