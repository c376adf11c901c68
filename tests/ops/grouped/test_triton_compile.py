"""The grouped kernels compile for sm_90 without a GPU, and as intended."""

from typing import Any

import pytest

from tests.ops.compiling import SHARED_BYTES, compile_report


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return compile_report("tests.ops.grouped.compile_kernels")


def test_kernels_compile_for_hopper(report: dict[str, Any]) -> None:
    for name, kernel in report.items():
        assert kernel["shared_bytes"] <= SHARED_BYTES, name
        assert kernel["wgmma"] and not kernel["mma"], name
        assert kernel["bulk_copies"] or kernel["copies"], name
    assert report["hopper_forward"]["bulk_copies"] and report["hopper_input_grads"]["bulk_copies"]


def test_kernels_of_frozen_weights_keep_their_sums_in_registers(report: dict[str, Any]) -> None:
    """Those of the pairs once did not fit: a product with them took three times as long."""
    frozen = [name for name in report if name.startswith(("exact_", "fp8_"))]
    assert len(frozen) == 8
    for name in frozen:
        assert report[name]["spilled_bytes"] <= 64, name
        assert not report[name]["serialised"], name
