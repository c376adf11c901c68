"""Copies and sums of token rows; without a GPU the kernels run in Triton's interpreter."""

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.ops.token_rows import (
    copy_rows,
    copy_rows_reference,
    row_places,
    sum_rows,
    sum_rows_reference,
)
from glm5.ops.triton_token_rows import copy_rows_fused, sum_rows_fused
from tests.ops.compiling import compile_report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (tokens, copies, width): none, one, several blocks of columns with a rest
SIZES = [(0, 3, 4), (3, 0, 4), (4, 2, 0), (1, 1, 1), (5, 8, 7), (6, 3, 1030), (2, 2, 2048)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw_tokens(t: int, copies: int, device: str = DEVICE) -> Tensor:
    """The token of each row, so many rows each, in any order."""
    return torch.arange(t, device=device).repeat(copies)[torch.randperm(t * copies, device=device)]


def draw_places(t: int, copies: int, device: str = DEVICE) -> Tensor:
    if copies == 0:
        return torch.empty(t, 0, dtype=torch.long, device=device)
    return row_places(draw_tokens(t, copies, device), copies)


@pytest.mark.parametrize(("t", "copies"), [(0, 8), (1, 1), (1, 8), (37, 8), (5000, 3)])
def test_places_are_the_rows_of_each_token_in_order(t: int, copies: int) -> None:
    tokens = draw_tokens(t, copies)
    places = row_places(tokens, copies)
    assert places.shape == (t, copies) and places.dtype == torch.long
    assert torch.equal(tokens[places], torch.arange(t, device=DEVICE)[:, None].expand(t, copies))
    assert bool((places.diff(dim=1) > 0).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("t", "copies", "width"), SIZES)
def test_they_copy_and_sum_as_pytorch_does(
    t: int, copies: int, width: int, dtype: torch.dtype
) -> None:
    places = draw_places(t, copies)
    x = torch.randn(t, width, device=DEVICE).to(dtype).requires_grad_()
    y = torch.randn(t * copies, width, device=DEVICE).to(dtype).requires_grad_()
    copied, summed = copy_rows(x, places), sum_rows(y, places)
    tokens = torch.empty(t * copies, dtype=torch.long, device=DEVICE)
    tokens[places] = torch.arange(t, device=DEVICE)[:, None]
    assert torch.equal(copied, x[tokens])
    assert_rounded_once(summed, y.detach().double()[places].sum(1), y, places)
    # each one's gradient is the other
    (grad_x,) = torch.autograd.grad(copied, x, y.detach())
    (grad_y,) = torch.autograd.grad(summed, y, x.detach())
    assert torch.equal(grad_x, summed) and torch.equal(grad_y, copied)


def assert_rounded_once(got: Tensor, exact: Tensor, y: Tensor, places: Tensor) -> None:
    """Half a unit of the last place, beside what adding in fp32 may cost."""
    limit = torch.finfo(got.dtype).eps / 2 * exact.abs()
    in_fp32 = torch.finfo(torch.float32).eps * y.detach().double().abs()[places].sum(1)
    in_fp32 *= 0 if got.dtype == torch.float64 else places.shape[1]
    slack = 1e-12 if got.dtype == torch.float64 else torch.finfo(got.dtype).smallest_normal
    assert bool(((got.double() - exact).abs() <= limit + in_fp32 + slack).all())


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "copies", "width"), SIZES)
def test_the_kernels_give_the_bits_of_the_references(
    t: int, copies: int, width: int, dtype: torch.dtype
) -> None:
    places = draw_places(t, copies)
    x, y = (torch.randn(rows, width, device=DEVICE).to(dtype) for rows in (t, t * copies))
    for other_strides in (False, True):
        if other_strides:
            x, y = x.t().contiguous().t(), y.t().contiguous().t()
        assert torch.equal(copy_rows_fused(x, places), copy_rows_reference(x, places))
        got, expected = sum_rows_fused(y, places), sum_rows_reference(y, places)
        # the interpreter cuts fp32 off to bf16 where a GPU rounds it
        is_cut = dtype == torch.bfloat16 and DEVICE == "cpu"
        limit = torch.finfo(dtype).eps * is_cut
        assert bool(((got.float() - expected.float()).abs() <= limit * expected.abs()).all())


def test_small_terms_are_not_lost() -> None:
    """In bf16 each of the later terms would be rounded away."""
    y = torch.tensor([256.0, *[0.75] * 7], device=DEVICE).to(torch.bfloat16)[:, None]
    places = torch.arange(8, device=DEVICE)[None]
    assert sum_rows(y, places).item() == 262.0


def test_gradients_of_first_and_second_order() -> None:
    places = draw_places(4, 3, "cpu")
    x, y = torch.randn(4, 2).double(), torch.randn(12, 2).double()
    for function, rows in ((copy_rows, x), (sum_rows, y)):
        rows.requires_grad_()
        check = torch.autograd.gradcheck, torch.autograd.gradgradcheck
        assert all(run(lambda r, f=function: f(r, places), (rows,)) for run in check)


@pytest.mark.parametrize("function", [copy_rows, sum_rows])
def test_the_backward_keeps_the_places_alone(function: object) -> None:
    places, kept = draw_places(4, 3), []
    rows = torch.randn(4 if function is copy_rows else 12, 2, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        function(rows, places)  # type: ignore[operator]
    assert [x.data_ptr() for x in kept] == [places.data_ptr()]


@pytest.mark.parametrize("function", [copy_rows, sum_rows])
def test_rows_that_do_not_fit_the_places_are_refused(function: object) -> None:
    with pytest.raises(AssertionError, match="places"):
        function(torch.empty(5, 2), draw_places(4, 3, "cpu"))  # type: ignore[operator]


@pytest.mark.gpu
@pytest.mark.parametrize("t", [8192, 65536])
def test_the_models_sizes_are_exact_and_repeatable(t: int) -> None:
    copies, width = 8, 6144
    places = draw_places(t, copies, "cuda")
    y = torch.randn(t * copies, width, device="cuda", dtype=torch.bfloat16)
    summed = sum_rows(y, places)
    for first in range(0, t, 4096):
        own = places[first : first + 4096]
        exact = y[own.flatten()].view(*own.shape, width).double().sum(1)
        # beside the one rounding: fp32 is finer by 16 bits, and values that nearly cancel keep less
        limit = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 1e-5
        error = (summed[first : first + 4096].double() - exact).abs()
        assert bool((error <= limit).all())
    copied = copy_rows(summed, places)
    for k in range(copies):
        assert torch.equal(copied[places[:, k]], summed)
    assert torch.equal(sum_rows(y, places), summed)


def test_they_compile_for_hopper_in_wide_steps() -> None:
    """A thread moves 16 bytes by one instruction, in each row that it touches."""
    report = compile_report("tests.ops.compile_token_rows")
    assert report["copy"] == {"loads": 1, "stores": 8, "spilled_bytes": 0}
    assert report["sum"] == {"loads": 8, "stores": 1, "spilled_bytes": 0}
