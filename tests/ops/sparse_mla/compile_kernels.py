"""Compiles the attention's Gluon kernels for Hopper without a GPU; prints what became as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_hopper.py.
"""

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from glm5.ops.sparse_mla import hopper_bwd, hopper_fwd

_TYPES = {
    "lengths": "*i32",
    "indices": "*i32",
    "members": "*i32",
    "lse": "*fp32",
    "grad_kv": "*fp32",
    "scale_log2": "fp32",
    "softmax_scale": "fp32",
    "num_keys": "i32",
    "num_rows": "i32",
    "rows_per_item": "i32",
    "heads_per_query": "i32",
    "width": "i32",
}


def compile_kernel(kernel: Any, **constants: Any) -> dict[str, Any]:
    """Pointers and widths are aligned, as they are in use."""
    types = {name: _TYPES.get(name, "*bf16") for name in kernel.arg_names}
    if constants.get("KEEP_ROWS"):
        types["grad_kv"] = "*bf16"
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(types)
        if types[name].startswith("*") or name == "width"
    }
    source = GluonASTSource(kernel, types, constants, attrs=aligned)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*", ptx)
    return {
        "shared_bytes": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "register_budgets": "setmaxnreg" in ptx,
        "copies": len(copies),
        "copies_of_16_bytes": sum("0x10" in copy for copy in copies),
    }


if __name__ == "__main__":
    backward = hopper_bwd._sparse_mla_bwd_hopper_kernel
    report = {
        f"{name}{' packed' if packed else ''}": compile_kernel(kernel, PACKED=packed, **constants)
        for packed in (False, True)
        for name, kernel, constants in (
            ("forward", hopper_fwd._sparse_mla_fwd_hopper_kernel, {}),
            ("backward", backward, {"KEEP_ROWS": False}),
            ("backward_rows", backward, {"KEEP_ROWS": True}),
        )
    }
    print(json.dumps(report))
