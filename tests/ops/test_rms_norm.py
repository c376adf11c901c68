"""The fused RMSNorm; without a GPU in Triton's interpreter, which tests/conftest.py switches on."""

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.ops import triton_rms_norm
from glm5.ops.rms_norm import rms_norm, rms_norm_reference
from glm5.ops.triton_rms_norm import rms_norm_fused
from tests.ops.compiling import compile_report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
Norm = Callable[[Tensor, Tensor, float], Tensor]
HALVES = [torch.bfloat16, torch.float16]
# Triton's interpreter truncates to bf16
ROUNDED_HALVES = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16]


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What RMSNorm was before it was fused, in fp64 for fp64 tensors."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def case(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, gradient of the result."""
    x, grad = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    return 3 * x, (1 + 0.3 * torch.randn(shape[-1], device=DEVICE)).to(dtype), grad


def run(norm: Norm, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """y, gradient of x, gradient of weight."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(*leaves, EPS)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


def check_errors(x: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Each at most twice the error of plain PyTorch, plus one rounding."""
    exact = run(plain, x.double(), weight.double(), grad.double())
    theirs, ours = (run(norm, x, weight, grad) for norm in (plain, rms_norm_fused))
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        if true.numel():
            rounding = torch.finfo(mine.dtype).eps * true.abs().max()
            my_error, their_error = ((y.double() - true).abs().max() for y in (mine, other))
            assert my_error <= 2 * their_error + rounding


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(0, 4), (1, 3), (5, 7), (2, 3, 512), (3, 1, 2050), (6,)])
def test_error_is_at_most_twice_that_of_plain_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_errors(*case(*shape, dtype=dtype))


def test_one_column() -> None:
    inputs = case(4, 1, dtype=torch.float32)
    # the gradient of x is a difference of equal terms
    for mine, other in zip(run(rms_norm_fused, *inputs), run(plain, *inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("width", [512, 2048, 6144])
def test_error_at_the_sizes_of_the_model(width: int, dtype: torch.dtype) -> None:
    check_errors(*case(8192, width, dtype=dtype))


@pytest.mark.parametrize("dtype", ROUNDED_HALVES)
def test_the_cast_comes_before_the_weight(dtype: torch.dtype) -> None:
    x, weight, _ = case(64, 48, dtype=dtype)
    ours = rms_norm_fused(x, weight, EPS)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    rounded_once = (weight.float() * wide).to(dtype)
    assert (ours != plain(x, weight, EPS)).float().mean() < 0.01
    assert (ours != rounded_once).float().mean() > 0.05


@pytest.mark.parametrize("norm", [rms_norm_fused, rms_norm_reference])
@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_result_and_gradients_have_the_dtypes_of_pytorch(
    norm: Norm, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, weight, grad = case(5, 24, dtype=torch.float32)
    x, weight = x.to(dtypes[0]), weight.to(dtypes[1])
    ours, theirs = run(norm, x, weight, grad), run(plain, x, weight, grad)
    assert [y.dtype for y in ours] == [torch.float32, *dtypes]
    for mine, other in zip(ours, theirs, strict=True):
        # PyTorch rounds the gradient once more on its way to x
        eps = 4 * max(torch.finfo(dtype).eps for dtype in (mine.dtype, x.dtype))
        torch.testing.assert_close(mine, other, rtol=eps, atol=eps)


@pytest.mark.parametrize("norm", [rms_norm_fused, rms_norm_reference])
@pytest.mark.parametrize(
    "strided",
    [
        pytest.param(lambda x: x.transpose(0, 1), id="embedding"),
        pytest.param(lambda x: x[:1].transpose(0, 1), id="embedding of one row"),
        pytest.param(lambda x: x[..., 3:20], id="columns of a wider tensor"),
        pytest.param(lambda x: x.mT, id="columns apart"),
        pytest.param(lambda x: x[:, :1].expand(-1, 4, -1), id="expanded"),
    ],
)
def test_any_strides_give_a_row_major_result(
    norm: Norm, strided: Callable[[Tensor], Tensor]
) -> None:
    x = strided(case(3, 5, 24, dtype=torch.float32)[0])
    weight = torch.rand(x.shape[-1], device=DEVICE)
    grad = strided(torch.randn(3, 5, 24, device=DEVICE))
    ours = run(norm, x, weight, grad)
    assert ours[0].stride() == torch.empty(x.shape).stride()
    new = (y.contiguous() for y in (x, weight, grad))
    for mine, other in zip(ours, run(norm, *new), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("norm", [rms_norm_fused, rms_norm_reference])
@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_wanted_gradients(norm: Norm, wanted: str) -> None:
    x, weight, grad = case(5, 24, dtype=torch.float32)
    leaf = (x if wanted == "x" else weight).requires_grad_()
    (mine,) = torch.autograd.grad(norm(x, weight, EPS), [leaf], grad)
    (other,) = torch.autograd.grad(plain(x, weight, EPS), [leaf], grad)
    torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("norm", [rms_norm_fused, rms_norm_reference])
def test_keeps_its_input_and_at_most_one_number_for_each_row(norm: Norm) -> None:
    x, weight, _ = case(5, 1024, dtype=torch.float32)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        norm(x.requires_grad_(), weight.requires_grad_(), EPS)
    inputs = {x.data_ptr(), weight.data_ptr()}
    assert sum(y.numel() for y in kept if y.data_ptr() not in inputs) <= 5
    assert {y.data_ptr() for y in kept} >= inputs


def check_rows_are_alone(num_rows: int, width: int) -> None:
    x, weight, grad = case(num_rows, width, dtype=torch.bfloat16)
    y, grad_x, _ = run(rms_norm_fused, x, weight, grad)
    for rows in (slice(0, 1), slice(2, num_rows - 1)):
        alone = run(rms_norm_fused, x[rows], weight, grad[rows])
        assert torch.equal(y[rows], alone[0])
        assert torch.equal(grad_x[rows], alone[1])


def test_a_row_does_not_depend_on_the_others() -> None:
    check_rows_are_alone(5, 24)


@pytest.mark.gpu
def test_a_row_of_the_model_does_not_depend_on_the_others() -> None:
    check_rows_are_alone(8192, 6144)


def test_more_rows_than_programs_sum_into_the_gradient_of_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_rms_norm, "_WEIGHT_PROGRAMS", 3)
    check_errors(*case(8, 24, dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 6144])
def test_same_bits_twice(width: int) -> None:
    inputs = case(8192, width, dtype=torch.bfloat16)
    first, second = (run(rms_norm_fused, *inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_the_reference_has_the_bits_of_plain_pytorch() -> None:
    inputs = case(9, 24, dtype=torch.bfloat16)
    ours, theirs = run(rms_norm_reference, *inputs), run(plain, *inputs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "is_fused"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)]
)
def test_a_gpu_runs_the_kernels(
    dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(triton_rms_norm, "rms_norm_fused", lambda *args: called.append(args))
    x, weight, _ = case(3, 24, dtype=dtype)
    rms_norm(x, weight, EPS)
    assert bool(called) == is_fused


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.compile_elementwise")
    norms = {name: kernel for name, kernel in report.items() if name.startswith("rms_norm")}
    assert len(norms) == 9
    assert not any(kernel["spilled_bytes"] for kernel in norms.values())
    # eight elements at a time
    assert all(kernel["wide_loads"] for kernel in norms.values())
