"""Backend "triton": fused kernels, Gluon on Hopper for the sizes of GLM-5, plain Triton else."""

from glm5.ops.indexer.triton_select import select_topk
from glm5.ops.indexer_kl.autograd import indexer_kl
from glm5.ops.sparse_mla.autograd import sparse_mla

__all__ = ["indexer_kl", "select_topk", "sparse_mla"]
