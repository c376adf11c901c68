"""Compiles the kernels of the indexer's loss for Hopper without a GPU; prints a report as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_triton_compile.py.
"""

import json
from typing import Any

import torch
from triton.compiler import ASTSource

from glm5.ops.indexer_kl import triton_divergence, triton_grads, triton_mass
from tests.ops.indexer.compile_kernels import compile_kernel

_KEYS = {"indices_ptr": "*i32", "starts_ptr": "*i32", "num_keys_ptr": "*i32", "width": "i32"}
_POINTERS = {
    triton_mass._attention_mass_kernel: {"q_ptr": "*bf16", "kv_ptr": "*bf16", "lse_ptr": "*fp32"}
    | {"mass_ptr": "*fp32", "scale_log2": "fp32"},
    triton_divergence._divergence_kernel: {"q_ptr": "*bf16", "k_ptr": "*bf16"}
    | dict.fromkeys(("weights_ptr", "mass_ptr", "grad_scores_ptr", "kl_ptr"), "*fp32"),
    triton_grads._score_grads_kernel: {"q_ptr": "*bf16", "k_ptr": "*bf16", "grad_q_ptr": "*bf16"}
    | {f"{name}_ptr": "*fp32" for name in ("grad_scores", "grad_kl", "grad_k", "grad_weights")}
    | {"weights_ptr": "*fp32"},
}


def compile_as_launched(kernel: Any, options: dict[str, Any], is_listed: bool) -> Any:
    """With the tiles that the launcher chooses at the sizes of GLM-5."""
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    arguments = {**_POINTERS[kernel], **_KEYS, **options, "UPCAST": False, "IS_LISTED": is_listed}
    arguments = {name: arguments[name] for name in kernel.arg_names}
    return compile_kernel(ASTSource, kernel, arguments, **launch)


def main() -> None:
    """Compile the forms of each kernel and report."""
    q = torch.empty(1, 64, 576, dtype=torch.bfloat16, device="meta")
    index_q = torch.empty(1, 32, 128, dtype=torch.bfloat16, device="meta")
    kernels = {
        "mass": (triton_mass._attention_mass_kernel, triton_mass.launch_options, q),
        "divergence": (
            triton_divergence._divergence_kernel, triton_divergence.launch_options, index_q,
        ),
        "grads": (triton_grads._score_grads_kernel, triton_grads.launch_options, index_q),
    }  # fmt: skip
    compiled = {
        f"{name}_{'sparse' if is_listed else 'dense'}": compile_as_launched(
            kernel, launch_options(tensor), is_listed
        )
        for name, (kernel, launch_options, tensor) in kernels.items()
        for is_listed in (True, False)
        if not (is_listed and name == "mass")  # the attention's forward gives it
    }
    report = {
        name: {
            "shared_bytes": kernel.metadata.shared,
            "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
            "mma": kernel.asm["ptx"].count("mma.sync"),
            "copies": kernel.asm["ptx"].count("cp.async.c"),
        }
        for name, kernel in compiled.items()
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
