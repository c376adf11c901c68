"""The kernels in plain Triton, as one pair."""

from torch import Tensor

from glm5.ops.sparse_mla import portable_bwd, portable_fwd
from glm5.ops.sparse_mla.kernels import AllocatesResults
from glm5.ops.sparse_mla.selection import Selection, one_by_one


class PortableKernels(AllocatesResults):
    """Plain Triton: any size."""

    @staticmethod
    def select(topk_indices: Tensor, h: int, num_keys: int) -> Selection:
        """Every query by itself."""
        del h, num_keys
        return one_by_one(topk_indices)

    forward_into = staticmethod(portable_fwd.sparse_mla_fwd_into)
    tile_shape = staticmethod(portable_fwd.tile_shape)
    backward = staticmethod(portable_bwd.sparse_mla_bwd)
    backward_rows = staticmethod(portable_bwd.sparse_mla_bwd_rows)
    num_row_parts = staticmethod(portable_bwd.num_head_parts)
    shuffles_rows = False
