"""Products with the rows of each head equal those with the dequantised weight, in little memory."""

import pytest
import torch
from torch import Tensor

from glm5.ops.absorbed import HeadRows, from_latent, to_latent
from glm5.ops.block_scaled import BlockScaled, quantise
from tests.ops.memory import measure_memory
from tests.tiny_models import assert_close, varied

HEADS, SIZE, LATENT, TOKENS = 5, 14, 20, 9
BLOCK = (8, 12)
ROWS = [HeadRows(SIZE, 0, 6), HeadRows(SIZE, 6, 8)]


def made(dtype: torch.dtype) -> tuple[BlockScaled, Tensor]:
    """The weight, and what it is per head."""
    weight = quantise(varied(torch.randn(HEADS * SIZE, LATENT), BLOCK), BLOCK)
    return weight, weight.dequantise(dtype).view(HEADS, SIZE, LATENT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transient_bytes", [0, 3000, 2**20])
@pytest.mark.parametrize("rows", ROWS)
def test_products_and_gradients(rows: HeadRows, transient_bytes: int, dtype: torch.dtype) -> None:
    weight, per_head = made(dtype)
    own = per_head[:, rows.first : rows.first + rows.count]
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    for product, equation, width in (
        (to_latent, "thd,hdr->thr", rows.count),
        (from_latent, "thr,hdr->thd", LATENT),
    ):
        x = torch.randn(TOKENS, HEADS, width).to(dtype).requires_grad_()
        y = product(x, weight, rows, transient_bytes=transient_bytes)
        grad = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, grad)
        expected_y = torch.einsum(equation, x, own)
        (expected,) = torch.autograd.grad(expected_y, x, grad)
        assert y.dtype == dtype
        assert_close(y.detach().float(), expected_y.detach().float(), limit)
        assert_close(got.float(), expected.float(), limit)


def test_no_tokens_give_no_rows() -> None:
    weight, _ = made(torch.float32)
    x = torch.empty(0, HEADS, ROWS[0].count)
    assert to_latent(x, weight, ROWS[0], transient_bytes=2**20).shape == (0, HEADS, LATENT)


def test_the_backward_keeps_the_float8_weight_alone() -> None:
    weight, _ = made(torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x = torch.randn(TOKENS, HEADS, LATENT, requires_grad=True)
        from_latent(x, weight, ROWS[1], transient_bytes=2**20)
    assert {x.data_ptr() for x in kept} == {weight.values.data_ptr(), weight.scales.data_ptr()}


@pytest.mark.parametrize("budget", [2**18, 2**20])
def test_no_more_is_dequantised_at_a_time_than_is_allowed(budget: int) -> None:
    heads, rows = 64, HeadRows(64, 0, 24)
    weight = quantise(torch.randn(heads * 64, 128), (32, 32))
    x = torch.randn(1, heads, 24).bfloat16().requires_grad_()
    head_bytes = 24 * 128 * 10
    assert head_bytes <= budget < heads * head_bytes, "else nothing is bounded here"
    # indices and scales of all rows are small beside the weight, and so are x and y
    small = weight.scales.nbytes * 32 * 2 + 4 * x.nbytes + 8 * heads * 128
    _, memory = measure_memory(lambda: to_latent(x, weight, rows, transient_bytes=budget))
    assert memory.peak_bytes <= budget + small
    _, unbounded = measure_memory(lambda: to_latent(x, weight, rows, transient_bytes=2**30))
    assert unbounded.peak_bytes > budget + small
