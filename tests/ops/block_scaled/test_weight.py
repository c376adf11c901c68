"""Block-scaled weights are their definition; parts and finer blocks are the same numbers."""

import pytest
import torch
from torch import Tensor

from glm5.ops.block_scaled import BlockScaled, quantise, scale_grid
from tests.tiny_models import varied

BLOCK = (8, 12)


def made(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[Tensor, BlockScaled]:
    weight = varied(torch.randn(rows, columns), block)
    return weight, quantise(weight, block)


@pytest.mark.parametrize("finer", [(8, 12), (4, 12), (8, 1), (2, 3), (1, 1)])
def test_finer_blocks_change_nothing(finer: tuple[int, int]) -> None:
    _, whole = made(29, 31)
    got = whole.in_blocks(finer)
    assert got.block == finer
    assert torch.equal(got.dequantise(torch.float32), whole.dequantise(torch.float32))


def test_a_stack_has_finer_blocks_too() -> None:
    stack = quantise(torch.randn(3, 10, 13), BLOCK)
    got = stack.in_blocks((4, 6))
    assert torch.equal(got.dequantise(torch.float32), stack.dequantise(torch.float32))
    assert torch.equal(got[1].dequantise(torch.float32), stack[1].dequantise(torch.float32))


def test_blocks_do_not_become_other_ones() -> None:
    _, whole = made(29, 31)
    with pytest.raises(AssertionError):
        whole.in_blocks((16, 12))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("start", "stop"), [(0, 29), (8, 16), (12, 29), (5, 6), (9, 20), (24, 24)])
def test_a_part_may_start_inside_a_block(dim: int, start: int, stop: int) -> None:
    _, whole = made(29, 29)
    size = BLOCK[dim]
    first, last = start // size, max(start // size, -(-stop // size))
    part = BlockScaled.starting_inside(
        whole.values.narrow(dim, start, stop - start),
        whole.scales.narrow(dim, first, last - first),
        BLOCK,
        dim,
        start - first * size,
    )
    assert part.block[dim] == (size if start % size == 0 else part.block[dim])
    expected = whole.dequantise(torch.float32).narrow(dim, start, stop - start)
    assert torch.equal(part.dequantise(torch.float32), expected)


def by_element(weight: BlockScaled) -> Tensor:
    """The definition, one element's block looked up at a time."""
    rows = torch.arange(weight.shape[0]) // weight.block[0]
    columns = torch.arange(weight.shape[1]) // weight.block[1]
    return weight.values.float() * weight.scales[rows][:, columns]


def random_fp8(rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> BlockScaled:
    values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return BlockScaled(values, torch.rand(scale_grid((rows, columns), block)) + 0.5, block)


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (127, 128), (128, 129), (576, 257), (256, 0), (0, 5)]
)
def test_dequantise_is_the_definition(rows: int, columns: int) -> None:
    weight = random_fp8(rows, columns)
    assert torch.equal(weight.dequantise(torch.float32), by_element(weight))


def test_blocks_need_not_be_square() -> None:
    weight = random_fp8(10, 11, (4, 3))
    assert weight.scales.shape == (3, 4)
    assert torch.equal(weight.dequantise(torch.float32), by_element(weight))


def test_rounding_to_bfloat16_happens_once() -> None:
    weight = random_fp8(576, 256)
    got = weight.dequantise(torch.bfloat16)
    assert torch.equal(got, by_element(weight).bfloat16())
    scales = weight.scales.bfloat16().repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)
    assert not torch.equal(got, weight.values.bfloat16() * scales)


def test_576_rows_have_a_ragged_fifth_block() -> None:
    weight = random_fp8(576, 128)
    assert weight.scales.shape == (5, 1)
    out = weight.dequantise(torch.float32)
    assert torch.equal(out[512:], weight.values[512:].float() * weight.scales[4])


def test_without_memory_there_are_shapes() -> None:
    weight = random_fp8(300, 200)
    meta = BlockScaled(weight.values.to("meta"), weight.scales.to("meta"))
    assert meta.dequantise(torch.bfloat16).shape == (300, 200)
