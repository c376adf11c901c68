"""One rank's share of a layout of eight: what it takes is what the planner says, to 10 %."""

import math
from typing import Any

import pytest

from tests.node_share.jobs import measure, narrow_share
from tests.parallel.processes import run_ranks

BF16, FP32 = 2, 4
CASES = (("ep=8,cp=8", "fp8", 7), ("tp=8,ep=8", "fp8", 3), ("ep=8,cp=8", "dtype", 0))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} {case[1]}")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, str, int], dict[str, Any]]:
    (result,) = run_ranks(tmp_path_factory.mktemp("share"), 1, measure, *request.param)
    return request.param, result


Found = tuple[tuple[str, str, int], dict[str, Any]]


def test_bytes_are_as_predicted(found: Found) -> None:
    _, result = found
    for name, rel in (("weights", 0.001), ("gradients", 0.01), ("peak", 0.1)):
        measured, predicted = result[name]
        assert measured == pytest.approx(predicted, rel=rel), name
    measured, predicted = result["optimizer"]
    assert predicted <= measured < predicted + 2**20


def test_float8_weights_take_half(found: Found) -> None:
    """Experts hold nothing else: a byte per weight, and 4 for each block of 128 x 128 or less."""
    (layout, base_weights, _), result = found
    c = narrow_share(layout, base_weights="fp8", tokens=8).config
    weights = 2 * (c.n_routed_experts // 8) * 3 * c.moe_intermediate_size * c.hidden_size
    scales = weights // 128**2 * FP32
    expected = BF16 * weights if base_weights == "dtype" else weights + scales
    assert result["parts"]["routed experts"] == expected


def test_the_share_trains(found: Found) -> None:
    _, result = found
    assert all(math.isfinite(loss) for loss in result["losses"])
    total, copies = result["seconds"]
    assert 0 < copies < total and result["tokens_per_second"] > 0


def test_experts_get_what_all_ranks_send(found: Found) -> None:
    """As many rows as if every rank sent what this one does; routing is nearly even."""
    _, result = found
    least, most, balanced = result["rows"]
    assert 0.75 * balanced < least <= most < 1.25 * balanced


def test_every_collective_of_a_layer_is_counted(found: Found) -> None:
    (layout, _, rank), result = found
    calls = {(op, axis): count for op, axis, count in result["calls"]}
    # dispatch and combine of rows and their weights, twice because recomputed, and back
    assert calls["all-to-all", "ep"] == 2 * (3 + 3 + 3)
    share = narrow_share(layout, base_weights="fp8", tokens=192, rank=rank)
    c, keys = share.config, share.work.seq_len
    if layout == "ep=8,cp=8":
        # latent keys of five layers and index keys of three, in two forward passes
        assert calls["all-gather", "cp"] == 2 * (5 + 3)
        width = 5 * c.d_qk + 3 * c.index_head_dim
        assert result["bytes"]["all-gather cp"] == 2 * BF16 * (keys - keys // 8) * width
        assert result["bytes"]["reduce-scatter cp"] == 5 * BF16 * (keys - keys // 8) * c.d_qk
