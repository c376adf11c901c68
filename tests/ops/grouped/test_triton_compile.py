"""The grouped kernels compile for sm_90 without a GPU, and as intended."""

from tests.ops.compiling import SHARED_BYTES, compile_report


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.grouped.compile_kernels")
    for name, kernel in report.items():
        assert kernel["shared_bytes"] <= SHARED_BYTES, name
        assert kernel["wgmma"] and not kernel["mma"], name
        assert kernel["bulk_copies"] or kernel["copies"], name
    assert report["hopper_forward"]["bulk_copies"] and report["hopper_input_grads"]["bulk_copies"]
