"""Backend "torch": portable, chunked, memory-bounded, any device and any size."""

from glm5.ops.indexer.reference import select_topk
from glm5.ops.indexer_kl.reference import indexer_kl
from glm5.ops.sparse_mla.reference import sparse_mla

__all__ = ["indexer_kl", "select_topk", "sparse_mla"]
