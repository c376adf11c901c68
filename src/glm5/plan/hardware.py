"""What one NVIDIA H200 and its links can do at most; measured figures unless they say datasheet."""

from __future__ import annotations

GIB = 2**30

# bf16 matrix products of 8192^3 back to back, limited by power (795e12 in a short burst); one
# H200, 2026-11-30.
MATMUL_FLOPS_PER_S = 674e12
# Device-to-device copy of 4 GiB, read plus written; the same card.
MEMORY_BYTES_PER_S = 4.31e12
# docs/performance.md: 8,192 causal queries, 64 heads, topk 2048; FLOPs of valid pairs.
SPARSE_FORWARD_FLOPS_PER_S = 609e12
SPARSE_BACKWARD_FLOPS_PER_S = 433e12
# docs/performance.md: select_topk of 32,768 tokens in 9.03 ms, 8,192 FLOPs per causal pair.
INDEXER_FLOPS_PER_S = 487e12
# Datasheet, not measured here: NVLink 4 of an H200, one direction.
NVLINK_BYTES_PER_S = 450e9
# Assumed, not measured here: what a collective reaches of it, and what its start costs.
NVLINK_SHARE = 0.8
COLLECTIVE_START_S = 20e-6
# Datasheet, not measured here: one 400 Gbit/s network adapter per GPU, one direction.
NETWORK_BYTES_PER_S = 50e9
# Datasheet: an HGX or DGX H200 has eight GPUs on one NVLink switch.
GPUS_PER_NODE = 8

# What a GPU must have beside predicted tensors: allowances that cover what docs/performance.md
# ("Predicted memory") measured on one GPU. Peaks lay up to 2 % above the prediction, and 3.2 GiB
# were outside torch's allocator (the CUDA context, kernels); the rest is for NCCL.
FRAGMENTATION = 1.02
OUTSIDE_ALLOCATOR_BYTES = 6 * GIB
