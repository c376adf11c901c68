"""Backend "triton": fused kernels, Gluon on Hopper for the sizes of GLM-5, plain Triton else."""

from glm5.ops.indexer.triton_select import select_topk
from glm5.ops.indexer_kl.autograd import indexer_kl, indexer_kl_dense
from glm5.ops.sparse_mla.autograd import sparse_mla, sparse_mla_with_mass

__all__ = ["indexer_kl", "indexer_kl_dense", "select_topk", "sparse_mla", "sparse_mla_with_mass"]
