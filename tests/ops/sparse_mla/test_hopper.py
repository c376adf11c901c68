"""The Gluon kernels compile for sm_90 without a GPU, and as intended."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from glm5.ops.sparse_mla import hopper_bwd, hopper_fwd

_TYPES = {
    "lengths": "*i32",
    "topk_indices": "*i32",
    "lse": "*fp32",
    "grad_kv": "*fp32",
    "scale_log2": "fp32",
    "softmax_scale": "fp32",
    "num_keys": "i32",
    "num_heads": "i32",
    "topk": "i32",
}
# What one block may have on the chip, less what the system takes.
_MOST_SHARED_BYTES = 232_448 - 1_024


@pytest.mark.parametrize(
    "kernel", [hopper_fwd._sparse_mla_fwd_hopper_kernel, hopper_bwd._sparse_mla_bwd_hopper_kernel]
)
def test_kernel_compiles_for_hopper(kernel) -> None:
    types = {name: _TYPES.get(name, "*bf16") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(types)
        if types[name].startswith("*") or name == "topk"
    }
    source = GluonASTSource(kernel, types, attrs=aligned)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= _MOST_SHARED_BYTES
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "setmaxnreg" in ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*", ptx)
    assert copies
    assert all("0x10" in copy for copy in copies)  # 16 bytes each
