"""The Gluon kernels compile for sm_90 without a GPU, and as intended."""

from tests.ops.compiling import SHARED_BYTES, compile_report


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.sparse_mla.compile_kernels")
    assert len(report) == 6
    for kernel in report.values():
        assert kernel["shared_bytes"] <= SHARED_BYTES
        assert kernel["wgmma"] and kernel["register_budgets"]
        assert kernel["copies"] > 0
        assert kernel["copies_of_16_bytes"] == kernel["copies"]
