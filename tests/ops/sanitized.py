"""Every fused operation on small sizes, for NVIDIA's checkers of memory accesses and races.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python -m tests.ops.sanitized [PART OF A NAME]

Without the cache every tensor is an allocation of its own, so that an access behind its end is
seen.
"""

import sys

import torch

from tests.ops.fused_ops import fused_ops


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    torch.manual_seed(0)
    for name, run in fused_ops(t_q=37, t_k=150, topk=70):
        if wanted in name:
            run()
            torch.cuda.synchronize()
            print("ran", name, flush=True)


if __name__ == "__main__":
    main()
