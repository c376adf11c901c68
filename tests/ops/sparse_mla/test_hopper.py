"""The Gluon kernels compile for sm_90 without a GPU, and as intended."""

from tests.ops.compiling import SHARED_BYTES, compile_report


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.sparse_mla.compile_kernels")
    kernels, sums = report["hopper"], report["sums"]
    assert len(kernels) == 8
    for name, kernel in kernels.items():
        assert kernel["shared_bytes"] <= SHARED_BYTES
        assert kernel["wgmma"] and kernel["register_budgets"]
        assert kernel["copies"] > 0
        assert kernel["copies_of_16_bytes"] == kernel["copies"]
        # Each of two groups of warps keeps the tiles of the other.
        assert kernel["tiles_kept"] == (2 if "keeps" in name else 0)
    # A row of a tile is read in wide pieces: 64 rows of 128 bytes by 32 threads.
    assert sums["one by one"]["loads_of_16_bytes"] == 16
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in sums.values())
