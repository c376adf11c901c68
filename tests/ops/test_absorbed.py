"""Products with the rows of each head equal those with the dequantised weight, in little memory."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from glm5.bench.timing import peak_bytes
from glm5.ops.absorbed import HeadPair, HeadRows, from_latent, to_latent
from glm5.ops.block_scaled import BlockScaled, quantise
from tests.ops.memory import measure_memory
from tests.tiny_models import assert_close, varied

HEADS, SIZE, LATENT, TOKENS = 5, 14, 20, 9
SCALE = 1.75
BLOCK = (8, 12)
ROWS = [HeadRows(SIZE, 0, 6), HeadRows(SIZE, 6, 8)]


def made(dtype: torch.dtype) -> tuple[BlockScaled, Tensor]:
    """The weight, and what it is per head."""
    weight = quantise(varied(torch.randn(HEADS * SIZE, LATENT), BLOCK), BLOCK)
    return weight, weight.dequantise(dtype).view(HEADS, SIZE, LATENT)


@dataclass
class Case:
    """What goes into a product, with leaves for gradients."""

    x: Tensor
    a: Tensor | None
    b: Tensor | None

    @classmethod
    def draw(cls, rows: HeadRows, width: int, rank: int, dtype: torch.dtype) -> "Case":
        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype).requires_grad_()

        x = leaf(TOKENS, HEADS, width)
        if not rank:
            return cls(x, None, None)
        return cls(x, leaf(rank, LATENT), leaf(HEADS, rows.count, rank))

    @property
    def pair(self) -> HeadPair | None:
        if self.a is None or self.b is None:
            return None
        return HeadPair(self.a, self.b, SCALE)

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.x, self.a, self.b) if leaf is not None]


def expected_of(case: Case, w: Tensor, *, to_latent: bool) -> Tensor:
    """By definition; w [h, count, r]."""
    if case.a is not None and case.b is not None:
        w = w + SCALE * case.b @ case.a
    if not to_latent:
        return torch.einsum("thr,hdr->thd", case.x, w)
    inputs, passed = case.x.tensor_split([w.shape[1]], dim=-1)
    return torch.cat([torch.einsum("thd,hdr->thr", inputs, w), passed], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("transient_bytes", [0, 3000, 2**20])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("passed", [0, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_products_and_gradients(
    rows: HeadRows,
    passed: int,
    rank: int,
    transient_bytes: int,
    is_scaled: bool,
    dtype: torch.dtype,
) -> None:
    weight, per_head = made(dtype)
    own = per_head[:, rows.first : rows.first + rows.count]
    frozen = weight if is_scaled else per_head.flatten(0, 1)
    limit = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for product, width in ((to_latent, rows.count + passed), (from_latent, LATENT)):
        case = Case.draw(rows, width, rank, dtype)
        y = product(case.x, frozen, rows, case.pair, transient_bytes=transient_bytes)
        expected = expected_of(case, own, to_latent=product is to_latent)
        grad = torch.randn_like(y)
        got = torch.autograd.grad(y, case.leaves, grad)
        theirs = torch.autograd.grad(expected, case.leaves, grad)
        assert y.dtype == dtype and y.is_contiguous()
        for ours, other in zip((y, *got), (expected, *theirs), strict=True):
            assert_close(ours.detach().double(), other.detach().double(), limit)


def test_inputs_may_be_views() -> None:
    weight, _ = made(torch.float32)
    rows = ROWS[0]
    wide = torch.randn(TOKENS, HEADS, rows.count + 7)
    view = wide[..., 2 : rows.count + 4]
    y = to_latent(view, weight, rows, transient_bytes=2**20)
    assert torch.equal(y, to_latent(view.contiguous(), weight, rows, transient_bytes=2**20))


def test_a_trained_weight_is_not_taken() -> None:
    weight = torch.randn(HEADS * SIZE, LATENT, requires_grad=True)
    with pytest.raises(AssertionError, match="frozen"):
        to_latent(torch.randn(2, HEADS, 6), weight, ROWS[0])


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["to_latent", "from_latent"])
def test_nothing_as_large_as_the_result_is_made_beside_it(name: str) -> None:
    heads, latent, tokens, rank = 64, 512, 2048, 16
    rows = HeadRows(448, 0, 192) if name == "to_latent" else HeadRows(448, 192, 256)
    product, width = (to_latent, 256) if name == "to_latent" else (from_latent, latent)

    def made_on_a_gpu(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    weight = quantise(made_on_a_gpu(heads * rows.size, latent))
    a, b = made_on_a_gpu(rank, latent), made_on_a_gpu(heads, rows.count, rank) * 0.1
    x = made_on_a_gpu(tokens, heads, width).requires_grad_()
    pair = HeadPair(a.requires_grad_(), b.requires_grad_(), SCALE)
    small = 2 * tokens * heads * rank * 2 + 10 * heads * rows.count * latent

    def run() -> Tensor:
        return product(x, weight, rows, pair, transient_bytes=2**30)

    y = run()
    assert peak_bytes(run) <= y.nbytes + small
    grad = torch.randn_like(y)

    def backward() -> object:
        return torch.autograd.grad(y, (x, a, b), grad, retain_graph=True)

    backward()
    assert peak_bytes(backward) <= x.nbytes + small
    w = weight.dequantise(torch.float64).view(heads, -1, latent)
    case = Case(x.detach().double(), a.detach().double(), b.detach().double())
    own = w[:, rows.first : rows.first + rows.count]
    expected = expected_of(case, own, to_latent=name == "to_latent")
    assert (y.double() - expected).norm() < 5e-3 * expected.norm()
