"""The indexer's kernels compile for sm_90 without a GPU, and as intended."""

from tests.ops.compiling import SHARED_BYTES, compile_report


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.indexer.compile_kernels")
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in report.values())
    hopper = [kernel for name, kernel in report.items() if name.startswith("hopper")]
    # Two warpgroups of two halves, each 128 dimensions in steps of 16.
    assert [kernel["wgmma"] for kernel in hopper] == [2 * 2 * 8] * len(hopper)
    assert all(kernel["tma"] for kernel in hopper)
    assert report["portable"]["wgmma"]
