"""Compiles the grouped kernels for Hopper without a GPU; prints a report as JSON.

Run as a program, in a process where Triton's interpreter is off: see test_triton_compile.py.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from glm5.ops.grouped import (
    hopper_exact,
    hopper_fp8,
    hopper_matmul,
    triton_matmul,
    triton_narrow,
    triton_sums,
)
from glm5.ops.grouped.triton_factors import Factors

WIDTH, OUT, RANK = 6144, 4096, 16


class Constant(NamedTuple):
    """A tuple that is a constant itself."""

    value: tuple[int, ...]


def compile_kernel(
    kernel: Any, arguments: dict[str, Any], source: type = ASTSource, **options: int
) -> Any:
    """Strings are types of run-time arguments, tuples of strings too; what else is constant.

    Pointers and integers are taken to be multiples of 16, as the model's sizes are.
    """
    names = kernel.arg_names
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(names):
        value = arguments[name]
        if isinstance(value, str):
            signature[name] = value
            aligned[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple) and not isinstance(value, Constant):
            signature[name] = value
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
        else:
            value = value.value if isinstance(value, Constant) else value
            signature[name], constants[name] = "constexpr", value
    aligned = {k: v for k, v in aligned.items() if "tensordesc" not in str(signature[names[k[0]]])}
    return triton.compile(
        source(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )


def _pairs(num: int) -> dict[str, Any]:
    return {
        "factors": ("*bf16",) * num,
        "ranks": ("i32",) * num,
        "group_strides": ("i32",) * num,
        "parts": ("i32",) * num,
    }


def _factors(num_pairs: int) -> Factors:
    factors = torch.empty(256, RANK, WIDTH, device="meta")
    numbers = range(num_pairs)
    return Factors.of([factors] * num_pairs, [RANK] * num_pairs, numbers, [1.0] * num_pairs)


def compile_matmul(
    num_pairs: int, forward: bool, block: triton_matmul.MatmulTiles | None = None
) -> Any:
    """The main product of fc1 as launched at GLM-5's width."""
    columns = OUT // 2 if forward else WIDTH
    x = torch.empty(65536, WIDTH if forward else OUT, dtype=torch.bfloat16, device="meta")
    block = block or triton_matmul.choose_tiles(x, 128, columns, RANK)
    rows = [block.columns, block.depth] if forward else [block.depth, block.columns]
    options = triton_matmul.block_options(x, block) | {"UPCAST": False}
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    tail = RANK if forward else RANK * max(1, num_pairs)
    scales = {
        "w_scales_ptr": "*bf16", "x_scales_ptr": "*bf16", "grid_rows": "i32", "grid_columns": "i32",
        "x_pieces": "i32", "IS_SCALED": False, "IS_QUANTISED": False, "SCALE_ROWS": 1,
        "SCALE_COLUMNS": 1,
    }  # fmt: skip
    arguments = {
        **scales, "x": f"tensordesc<bf16[{block.rows}, {block.depth}]>",
        "weight": f"tensordesc<bf16{rows}>",
        "out_ptr": "*bf16", "low_ptr": "*bf16", "table_ptr": "*i32", "count_ptr": "*i32",
        **_pairs(max(1, num_pairs)),
        **dict.fromkeys(
            ("num_slots", "depth", "out_columns", "part_columns", "in_features"), "i32"
        ),
        "RANK": RANK, "FORWARD": forward, "HAS_BASE": True, "HAS_PAIRS": num_pairs > 0,
        "TAIL": tail, "TAIL_STEP": min(tail, triton_matmul.TAIL_STEP), "USE_TMA": True, **options,
    }  # fmt: skip
    return compile_kernel(triton_matmul._grouped_matmul_kernel, arguments, **launch)


def compile_narrow(num_pairs: int, is_a: bool) -> Any:
    """The low-rank side of fc1."""
    x = torch.empty(65536, WIDTH, dtype=torch.bfloat16, device="meta")
    options = triton_narrow.launch_options(x, _factors(num_pairs), is_a=is_a, tile_rows=128)
    options["UPCAST"] = False
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    arguments = {
        "x_ptr": "*bf16", "low_ptr": "*bf16", "table_ptr": "*i32", "count_ptr": "*i32",
        "scales": ("fp32",) * num_pairs, **_pairs(num_pairs),
        **dict.fromkeys(("x_columns", "k_columns", "num_slots"), "i32"), "RANK": RANK, **options,
    }  # fmt: skip
    return compile_kernel(triton_narrow._narrow_kernel, arguments, **launch)


def compile_sums(num_pairs: int, is_a: bool) -> Any:
    """Gradients of the factors of fc1."""
    x = torch.empty(65536, WIDTH, dtype=torch.bfloat16, device="meta")
    factors = _factors(num_pairs)
    block = triton_sums.sum_tiles(x, factors, is_a=is_a)
    arguments = {
        "left_ptr": "*bf16", "right_ptr": "*bf16", "partial_ptr": "*fp32", "table_ptr": "*i32",
        "count_ptr": "*i32", **_pairs(num_pairs),
        **dict.fromkeys(("num_left", "left_stride", "right_stride"), "i32"),
        "RANK": RANK, "IS_A": is_a, "BLOCK_L": block.left, "BLOCK_R": block.right,
        "BLOCK_T": block.rows, "UPCAST": False,
    }  # fmt: skip
    options = {"num_warps": block.num_warps, "num_stages": block.num_stages}
    return compile_kernel(triton_sums._row_sums_kernel, arguments, **options)


def compile_add_chunks(is_a: bool) -> Any:
    """The sums of several chunks of fc1's factors."""
    x = torch.empty(65536, WIDTH, dtype=torch.bfloat16, device="meta")
    block = triton_sums.sum_tiles(x, _factors(2), is_a=is_a)
    arguments = {
        "partial_ptr": "*fp32", "ends_ptr": "*i32", "num_left": "i32", **_pairs(2), "RANK": RANK,
        "IS_A": is_a, "BLOCK_L": block.left, "BLOCK_R": block.right, "CHUNK": 2048, "GROUPS": 32,
    }  # fmt: skip
    del arguments["parts"]
    return compile_kernel(triton_sums._add_chunks_kernel, arguments, num_warps=block.num_warps)


def compile_hopper(num_pairs: int, forward: bool) -> Any:
    """The Gluon product of fc1."""
    w_block = [256, 64] if forward else [64, 256]
    arguments = {
        "x_desc": _gluon_descriptor([128, 64]), "w_desc": _gluon_descriptor(w_block),
        **_hopper_arguments(num_pairs, forward, w_block), "STAGES": hopper_matmul._STAGES,
    }  # fmt: skip
    kernel = hopper_matmul._grouped_matmul_hopper_kernel
    return compile_kernel(kernel, arguments, GluonASTSource, num_warps=4)


def compile_exact(num_pairs: int, forward: bool, rank: int = RANK) -> Any:
    """The same with the weight in float8, exact."""
    box, swizzle = ([128, 64], 64) if forward else ([64, 128], 128)
    arguments = {
        "x_desc": _gluon_descriptor([256, 64]), "q_desc": _fp8_descriptor(box, swizzle),
        "scales_ptr": "*fp32", "grid_rows": "i32", "grid_columns": "i32",
        **_hopper_arguments(num_pairs, forward, [64, 64], rows=256, piece=64, rank=rank),
        "STAGES": hopper_exact.STAGES,
    }  # fmt: skip
    kernel = hopper_exact._exact_matmul_hopper_kernel
    return compile_kernel(kernel, arguments, GluonASTSource, num_warps=4)


def compile_fp8(num_pairs: int, forward: bool, rank: int = RANK) -> Any:
    """The same in float8."""
    x_stages, q_stages, w_stages = hopper_fp8.stages(forward=forward)
    arguments = {
        "x_desc": _fp8_descriptor([256, 128], 128), "w_desc": _fp8_descriptor([128, 128], 128),
        "scale_desc": _descriptor("fp32", [1, 256], swizzle=0, bits=32),
        "scales_ptr": "*fp32", "grid_rows": "i32", "grid_columns": "i32",
        **_hopper_arguments(
            num_pairs, forward, [128, 64] if forward else [64, 128],
            rows=256, piece=64 if forward else 128, rank=rank,
        ),
        "X_STAGES": x_stages, "Q_STAGES": q_stages, "W_STAGES": w_stages,
    }  # fmt: skip
    kernel = hopper_fp8._fp8_matmul_hopper_kernel
    return compile_kernel(kernel, arguments, GluonASTSource, num_warps=4)


def _hopper_arguments(
    num_pairs: int,
    forward: bool,
    factor: list[int],
    *,
    rows: int = 128,
    piece: int = 128,
    rank: int = RANK,
) -> dict[str, Any]:
    """What the kernels for Hopper share: rows of a tile, a tile of a factor, columns stored."""
    return {
        "low_desc": _gluon_descriptor([rows, 64]), "out_desc": _gluon_descriptor([64, piece]),
        "factor_0": _gluon_descriptor([1, *factor]), "factor_1": _gluon_descriptor([1, *factor]),
        "out_ptr": "*bf16", "table_ptr": "*i32", "count_ptr": "*i32",
        "group_stride_0": 1, "group_stride_1": 1,
        **dict.fromkeys(("depth", "out_columns", "part_columns"), "i32"),
        "PARTS": Constant(tuple(range(num_pairs))), "RANK": rank, "RANK_STEPS": -(-rank // 64),
        "FORWARD": forward, "TOGETHER": 8,
    }  # fmt: skip


def _gluon_descriptor(shape: list[int]) -> str:
    return _descriptor("bf16", shape, swizzle=128, bits=16)


def _fp8_descriptor(shape: list[int], swizzle: int) -> str:
    return _descriptor("fp8e4nv", shape, swizzle=swizzle, bits=8)


def _descriptor(dtype: str, shape: list[int], *, swizzle: int, bits: int) -> str:
    layout = (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, "
        f"rank={len(shape)}, transposed=False, fp4_padded=False, cga_layout=[])"
    )
    return f"tensordesc<{dtype}{shape},{layout}>"


def report(kernel: Any) -> dict[str, int]:
    """Shared memory, registers that found no room, and the instructions that matter."""
    ptx = kernel.asm["ptx"]
    told = _assemble(ptx)
    return {
        "spilled_bytes": sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", told)),
        "serialised": told.count("instructions are serialized"),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
        "copies": ptx.count("cp.async.c"),
    }


def _assemble(ptx: str) -> str:
    """What the assembler says of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="ascii")
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source, "-o", f"{source}.cubin"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def main() -> None:
    """Compile each kernel as it is launched for fc1 with gate and up, rank 16.

    Those that multiply in float8 also with fewer pairs, each of which is a program of its own.
    """
    frozen = {
        f"{name}_{pairs}_{rank}_{'forward' if forward else 'input_grads'}": make(
            pairs, forward, rank
        )
        for name, make, forms in (
            ("exact", compile_exact, ((2, RANK),)),
            ("fp8", compile_fp8, ((0, RANK), (1, RANK), (2, 128))),
        )
        for pairs, rank in forms
        for forward in (True, False)
    }
    compiled = frozen | {
        "forward": compile_matmul(2, forward=True),
        "input_grads": compile_matmul(2, forward=False),
        "hopper_forward": compile_hopper(2, forward=True),
        "hopper_input_grads": compile_hopper(2, forward=False),
        "low": compile_narrow(2, is_a=True),
        "grad_low": compile_narrow(2, is_a=False),
        "a_grads": compile_sums(2, is_a=True),
        "b_grads": compile_sums(2, is_a=False),
    }
    for is_a in (True, False):
        compile_add_chunks(is_a)
    print(json.dumps({name: report(kernel) for name, kernel in compiled.items()}))


if __name__ == "__main__":
    main()
