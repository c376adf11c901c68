"""Compiles the kernels of the indexer's loss for Hopper without a GPU; prints a report as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_triton_compile.py.
"""

import json
from typing import Any

from triton.compiler import ASTSource

from glm5.ops.indexer_kl import triton_divergence, triton_grads, triton_mass
from tests.ops.indexer.compile_kernels import compile_kernel

_KEYS = {"indices_ptr": "*i32", "starts_ptr": "*i32", "num_keys_ptr": "*i32", "width": "i32"}
_INDEX = {"q_ptr": "*bf16", "k_ptr": "*bf16", "weights_ptr": "*fp32", "mass_ptr": "*fp32"}
_SIZES = {"NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_H": 32, "BLOCK_D": 128, "UPCAST": False}


def compile_mass(is_listed: bool) -> Any:
    """At the sizes of GLM-5's attention."""
    arguments = {
        **{"q_ptr": "*bf16", "kv_ptr": "*bf16", "lse_ptr": "*fp32", **_KEYS, "mass_ptr": "*fp32"},
        **{"scale_log2": "fp32", "NUM_HEADS": 64, "D_QK": 576, "IS_LISTED": is_listed},
        **{"BLOCK_H": 64, "BLOCK_N": 64, "BLOCK_D": 512, "BLOCK_TAIL": 64, "UPCAST": False},
    }
    return compile_kernel(
        ASTSource, triton_mass._attention_mass_kernel, arguments, num_warps=8, num_stages=2
    )


def compile_divergence(is_listed: bool) -> Any:
    """At the sizes of GLM-5's indexer."""
    arguments = {
        **{**_INDEX, **_KEYS, "scores_ptr": "*fp32", "kl_ptr": "*fp32", **_SIZES},
        **{"IS_LISTED": is_listed, "BLOCK_N": 128, "BLOCK_W": 1024},
    }
    return compile_kernel(
        ASTSource, triton_divergence._divergence_kernel, arguments, num_warps=4, num_stages=3
    )


def compile_grads(is_listed: bool) -> Any:
    """At the sizes of GLM-5's indexer."""
    index = {name: kind for name, kind in _INDEX.items() if name != "mass_ptr"}
    arguments = {
        **{"grad_scores_ptr": "*fp32", "grad_kl_ptr": "*fp32", **index, **_KEYS},
        **{"grad_q_ptr": "*bf16", "grad_k_ptr": "*fp32", "grad_weights_ptr": "*fp32", **_SIZES},
        **{"IS_LISTED": is_listed, "BLOCK_N": 64},
    }
    return compile_kernel(
        ASTSource, triton_grads._score_grads_kernel, arguments, num_warps=4, num_stages=2
    )


def main() -> None:
    """Compile both forms of each kernel and report."""
    makers = {"mass": compile_mass, "divergence": compile_divergence, "grads": compile_grads}
    compiled = {
        f"{name}_{'sparse' if is_listed else 'dense'}": make(is_listed)
        for name, make in makers.items()
        for is_listed in (True, False)
    }
    report = {
        name: {
            "shared_bytes": kernel.metadata.shared,
            "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
            "copies": kernel.asm["ptx"].count("cp.async.c"),
        }
        for name, kernel in compiled.items()
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
