"""The kernels of the indexer's loss compile for sm_90 without a GPU, and as intended."""

from tests.ops.compiling import SHARED_BYTES, compile_report


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.indexer_kl.compile_kernels")
    assert len(report) == 5
    for kernel in report.values():
        assert kernel["shared_bytes"] <= SHARED_BYTES
        assert kernel["wgmma"] or kernel["mma"]
        assert kernel["copies"]
    # Nothing but the target needs a warpgroup's product to be fast.
    assert report["mass_dense"]["wgmma"]
