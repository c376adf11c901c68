"""Compiles the kernels of token rows for Hopper without a GPU; prints a report as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_token_rows.py.
"""

import json
from typing import Any

import torch

from glm5.ops import triton_token_rows
from tests.ops.grouped.compile_kernels import compile_kernel, report

WIDTH, COPIES = 6144, 8


def compiled(kernel: Any) -> dict[str, int]:
    """Instructions that move 16 bytes, as launched at GLM-5's width."""
    rows = torch.empty(COPIES, WIDTH, dtype=torch.bfloat16, device="meta")
    options = triton_token_rows.options(rows, COPIES) | {"width": "i32"}
    num_warps = options.pop("num_warps")
    arguments = {"x": "*bf16", "y": "*bf16", "places": "*i64", **options}
    done = compile_kernel(kernel, arguments, num_warps=num_warps)
    ptx = done.asm["ptx"]
    return {
        "loads": ptx.count("ld.global.v4.b32"),
        "stores": ptx.count("st.global.v4.b32"),
        "spilled_bytes": report(done)["spilled_bytes"],
    }


def main() -> None:
    """Both kernels in bf16."""
    kernels = {
        "copy": triton_token_rows._copy_rows_kernel,
        "sum": triton_token_rows._sum_rows_kernel,
    }
    print(json.dumps({name: compiled(kernel) for name, kernel in kernels.items()}))


if __name__ == "__main__":
    main()
