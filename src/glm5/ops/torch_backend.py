"""Backend "torch": portable, chunked, memory-bounded, any device and any size."""

from glm5.ops.indexer.reference import select_topk
from glm5.ops.indexer_kl.reference import indexer_kl, indexer_kl_dense
from glm5.ops.sparse_mla.reference import sparse_mla, sparse_mla_with_mass

__all__ = ["indexer_kl", "indexer_kl_dense", "select_topk", "sparse_mla", "sparse_mla_with_mass"]
