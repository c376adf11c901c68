"""Compiles the attention's Gluon kernels for Hopper without a GPU; prints what became as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_hopper.py.
"""

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from glm5.ops.sparse_mla import head_sums, hopper_bwd, hopper_fwd

_KEPT = (
    "tensordesc<bf16[64, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2,"
    " transposed=False, fp4_padded=False, cga_layout=[])>"
)
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
    "kept_maxima": "*fp32",
    "num_tiles": "i32",
}


def compile_kernel(kernel: Any, **constants: Any) -> dict[str, Any]:
    """A Gluon kernel, with which of its intentions became true."""
    types = {name: _TYPES.get(name, "*bf16") for name in kernel.arg_names}
    if constants.get("KEEP_ROWS"):
        types["grad_kv"] = "*bf16"
    if constants.get("KEEPS"):
        types["kept_probs"] = _KEPT
    compiled = _compile(GluonASTSource, kernel, types, constants, num_warps=4)
    ptx = compiled.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*", ptx)
    return {
        "shared_bytes": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "register_budgets": "setmaxnreg" in ptx,
        "copies": len(copies),
        "copies_of_16_bytes": sum("0x10" in copy for copy in copies),
        "tiles_kept": ptx.count("cp.async.bulk.tensor.2d.global"),
    }


def compile_head_sums(queries: int, num_heads: int) -> dict[str, Any]:
    """With the tiles that the launcher chooses for tiles of the Hopper kernel."""
    constants = head_sums.launch_options(num_heads, queries * 2048)
    num_warps = constants.pop("num_warps")
    constants |= {"QUERIES": queries, "ROWS": 64, "KEYS": 64}
    kernel = head_sums._head_sums_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"probs": "*bf16", "maxima": "*fp32", "lse": "*fp32", "mass": "*fp32"}
    types |= dict.fromkeys(("topk_indices", "indices", "lengths"), "*i32")
    compiled = _compile(ASTSource, kernel, types, constants, num_warps=num_warps)
    loads = re.findall(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])
    return {"shared_bytes": compiled.metadata.shared, "loads_of_16_bytes": len(loads)}


def _compile(
    source: type, kernel: Any, types: dict[str, str], constants: dict[str, Any], *, num_warps: int
) -> Any:
    """Pointers and widths are aligned, as they are in use."""
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(types)
        if types[name].startswith("*") or name in ("width", "topk")
    }
    made = source(kernel, types, constants, attrs=aligned)
    return triton.compile(made, GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


if __name__ == "__main__":
    forward = hopper_fwd._sparse_mla_fwd_hopper_kernel
    backward = hopper_bwd._sparse_mla_bwd_hopper_kernel
    report = {
        f"{name}{' packed' if packed else ''}": compile_kernel(kernel, PACKED=packed, **constants)
        for packed in (False, True)
        for name, kernel, constants in (
            ("forward", forward, {"KEEPS": False}),
            ("forward that keeps", forward, {"KEEPS": True}),
            ("backward", backward, {"KEEP_ROWS": False}),
            ("backward_rows", backward, {"KEEP_ROWS": True}),
        )
    }
    sums = {"one by one": compile_head_sums(1, 64), "shared": compile_head_sums(8, 8)}
    print(json.dumps({"hopper": report, "sums": sums}))
