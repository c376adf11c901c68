"""Compiles the indexer's kernels for Hopper without a GPU; prints what became of them as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_triton_compile.py.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from glm5.ops.indexer import gluon_scores, triton_scores, triton_topk

_LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)
BOUNDS = {"starts_ptr": "*i32", "ends_ptr": "*i32"}
SIZES = {"num_rows": "i32", "num_keys": "i32", "topk": "i32"}


def compile_kernel(source: type, kernel: Any, arguments: dict[str, Any], **options: int) -> Any:
    """Strings are types of run-time arguments, everything else is a constant; pointers align."""
    names = kernel.arg_names
    signature = {n: v if isinstance(v, str) else "constexpr" for n, v in arguments.items()}
    constants = {n: v for n, v in arguments.items() if not isinstance(v, str)}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n.endswith("_ptr") or n == "scores_stride"
    }
    ordered = {n: signature[n] for n in names}
    return triton.compile(
        source(fn=kernel, signature=ordered, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )


def compile_hopper_scores(num_heads: int) -> Any:
    """The wgmma kernel."""
    return compile_kernel(
        GluonASTSource,
        gluon_scores._index_scores_hopper_kernel,
        {
            "q_desc": f"tensordesc<bf16[128, 128],{_LAYOUT}>",
            "k_desc": f"tensordesc<bf16[64, 128],{_LAYOUT}>",
            "weights_ptr": "*fp32",
            "scores_ptr": "*fp32",
            "first_key_ptr": "*i32",
            "first_tile_ptr": "*i32",
            "num_rows": "i32",
            "first_row": "i32",
            "num_blocks": "i32",
            "scores_stride": "i32",
            "NUM_HEADS": num_heads,
            "STAGES": 5,
            "MAX_BLOCKS": 512,
        },
        num_warps=4,
    )


def compile_portable_scores() -> Any:
    """The Triton kernel at the real size."""
    return compile_kernel(
        ASTSource,
        triton_scores._index_scores_kernel,
        {
            **{"q_ptr": "*bf16", "k_ptr": "*bf16", "weights_ptr": "*fp32", "scores_ptr": "*fp32"},
            **BOUNDS,
            **SIZES,
            **{"scores_stride": "i32", "NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_Q": 8},
            **{"BLOCK_H": 32, "BLOCK_K": 64, "BLOCK_D": 128, "KEYS_PER_PROGRAM": 1024},
        },
        num_warps=4,
        num_stages=2,
    )


def compile_selection() -> Any:
    """The selection at topk 2048."""
    return compile_kernel(
        ASTSource,
        triton_topk._select_rows_kernel,
        {
            **{"scores_ptr": "*fp32", "candidates_ptr": "*i32", "out_ptr": "*i32"},
            **BOUNDS,
            **SIZES,
            **{"scores_stride": "i32", "CAPACITY": 4096, "TILE": 1024},
        },
        num_warps=4,
        maxnreg=triton_topk._MAX_REGISTERS,
    )


def main() -> None:
    """Compile all of them and report."""
    compiled = {f"hopper_{h}_heads": compile_hopper_scores(h) for h in (8, 32, 64)}
    compiled |= {"portable": compile_portable_scores(), "selection": compile_selection()}
    report = {
        name: {
            "shared_bytes": kernel.metadata.shared,
            "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
            "tma": kernel.asm["ptx"].count("cp.async.bulk.tensor"),
        }
        for name, kernel in compiled.items()
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
