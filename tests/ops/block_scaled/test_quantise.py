"""Quantisation by blocks: scale = amax / 448, values rounded to the nearest."""

import pytest
import torch

from glm5.ops.block_scaled import quantise
from tests.tiny_models import varied

BLOCK = (128, 128)


@pytest.mark.parametrize(("rows", "columns"), [(300, 200), (1, 130), (128, 128)])
def test_quantise_then_dequantise_is_within_half_a_step(rows: int, columns: int) -> None:
    weight = varied(torch.randn(rows, columns), BLOCK)
    scaled = quantise(weight, BLOCK)
    error = (scaled.dequantise(torch.float32) - weight).abs()
    scales = scaled.scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    # e4m3 keeps 3 bits: half a step is 2**-4 of the value, or of the smallest normal 2**-6.
    step = torch.maximum(weight.abs(), scales * 2.0**-6) * 2.0**-4
    assert (error <= step * (1 + 1e-5)).all()
    assert scaled.values.float().abs().max() == 448


def test_each_block_is_quantised_by_itself() -> None:
    weight = varied(torch.randn(29, 31), (8, 12))
    scaled = quantise(weight, (8, 12))
    for i, rows in enumerate(weight.split(8)):
        for j, part in enumerate(rows.split(12, dim=1)):
            assert scaled.scales[i, j] == part.abs().max() / 448
            values = (part / scaled.scales[i, j]).to(torch.float8_e4m3fn).float()
            got = scaled.values[8 * i : 8 * i + 8, 12 * j : 12 * j + 12].float()
            assert torch.equal(got, values)


def test_a_block_of_zeros_stays_zero() -> None:
    scaled = quantise(torch.zeros(3, 3), BLOCK)
    assert scaled.scales.item() == 1.0
    assert not scaled.dequantise(torch.float32).any()
