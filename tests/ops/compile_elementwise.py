"""Compiles the kernels that are no products for Hopper without a GPU; prints a report as JSON.

Run as a program, in a process where Triton's interpreter is off: see compiling.py.
"""

import json
from typing import Any

from glm5.ops import triton_rms_norm, triton_rotation
from tests.ops.grouped.compile_kernels import compile_kernel, report

WIDTHS = (512, 2048, 6144)
# width, rotating dimensions, whether they are the first: attention's queries and keys, the indexer
HEADS = {"queries": (256, 64, False), "keys": (64, 64, True), "indexer": (128, 64, True)}


def compile_norm_fwd(width: int) -> Any:
    """RMSNorm of bf16 rows."""
    options = triton_rms_norm.launch_options(width)
    arguments = {
        "x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "scale_ptr": "*fp32",
        "x_stride": "i32", "width": "i32", "eps": "fp32", "BLOCK": options["BLOCK"],
    }  # fmt: skip
    kernel = triton_rms_norm._rms_norm_fwd_kernel
    return compile_kernel(kernel, arguments, num_warps=options["num_warps"])


def compile_norm_bwd(width: int, want_weight: bool) -> Any:
    """Its backward, of a frozen weight or of one that trains."""
    options = triton_rms_norm.launch_options(width)
    arguments = {
        "grad_ptr": "*bf16", "x_ptr": "*bf16", "weight_ptr": "*bf16", "scale_ptr": "*fp32",
        "grad_x_ptr": "*bf16", "partial_ptr": "*fp32" if want_weight else None,
        **dict.fromkeys(("num_rows", "grad_stride", "x_stride", "width"), "i32"),
        "WANT_X": True, "WANT_WEIGHT": want_weight, "BLOCK": options["BLOCK"],
    }  # fmt: skip
    kernel = triton_rms_norm._rms_norm_bwd_kernel
    return compile_kernel(kernel, arguments, num_warps=options["num_warps"])


def compile_rotation(width: int, dim: int, first: bool, interleaved: bool) -> Any:
    """Rope of bf16 heads."""
    options = triton_rotation.launch_options(width, dim // 2)
    launch = {name: options.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    arguments = {
        "x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16",
        **dict.fromkeys(("num_rows", "heads", "token_stride", "head_stride", "width"), "i32"),
        "PAIRS": dim // 2, "FIRST": first, "INTERLEAVED": interleaved, "FORWARD": True, **options,
    }  # fmt: skip
    return compile_kernel(triton_rotation._rotation_kernel, arguments, **launch)


def described(kernel: Any) -> dict[str, int]:
    """Also the loads and stores of 16 bytes, and products added before they are rounded."""
    ptx = kernel.asm["ptx"]
    wide = {"wide_loads": ptx.count("ld.global.v4"), "wide_stores": ptx.count("st.global.v4")}
    return report(kernel) | wide | {"fused_adds": ptx.count("fma.rn")}


def main() -> None:
    """Compile each kernel as it is launched for the widths of the model."""
    compiled = {
        f"rotation_{name}_{interleaved}": compile_rotation(*head, interleaved)
        for name, head in HEADS.items()
        for interleaved in (True, False)
    }
    for width in WIDTHS:
        compiled[f"rms_norm_fwd_{width}"] = compile_norm_fwd(width)
        for want_weight in (False, True):
            name = f"rms_norm_bwd_{width}_{'trained' if want_weight else 'frozen'}"
            compiled[name] = compile_norm_bwd(width, want_weight)
    print(json.dumps({name: described(kernel) for name, kernel in compiled.items()}))


if __name__ == "__main__":
    main()
