"""The Gluon kernels for Hopper, as one pair."""

from glm5.ops.sparse_mla.hopper_bwd import sparse_mla_bwd
from glm5.ops.sparse_mla.hopper_fwd import sparse_mla_fwd


class HopperKernels:
    """Gluon: bf16, d_qk 576, d_v 512, any number of heads."""

    forward = staticmethod(sparse_mla_fwd)
    backward = staticmethod(sparse_mla_bwd)
