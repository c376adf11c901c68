"""Rope on a part of each head; without a GPU in Triton's interpreter, as tests/conftest.py says."""

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.errors import ConfigError
from glm5.ops import triton_rotation
from glm5.ops.rope import apply_rope, rope_cos_sin
from glm5.ops.rotation import rotate, rotate_reference
from glm5.ops.triton_rotation import rotate_fused
from tests.ops.compiling import compile_report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THETA = 8e6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Triton's interpreter truncates to bf16
ROUNDED_DTYPES = [*DTYPES[:2], pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
every_way = pytest.mark.parametrize("interleaved", [True, False])
every_place = pytest.mark.parametrize("first", [True, False])


def tables(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens, device=DEVICE) * 7
    return rope_cos_sin(positions, dim, THETA)


def run(
    function: Callable[..., Tensor], x: Tensor, grad: Tensor, dim: int, **how: bool
) -> tuple[Tensor, Tensor]:
    """Result and gradient of x."""
    x = x.detach().requires_grad_()
    y = function(x, *tables(len(x), dim), **how)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def inputs(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, device=DEVICE).to(dtype), torch.randn(shape, device=DEVICE).to(dtype)


def check_bits(x: Tensor, grad: Tensor, dim: int, **how: bool) -> None:
    """Those of the reference, each way."""
    ours, theirs = (run(f, x, grad, dim, **how) for f in (rotate_fused, rotate_reference))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == x.dtype
        assert mine.is_contiguous()
        assert torch.equal(mine, other)


@every_place
@every_way
def test_the_reference_rotates_a_part_and_copies_the_rest(interleaved: bool, first: bool) -> None:
    x, _ = inputs(5, 3, 10, dtype=torch.float32)
    cos, sin = tables(5, 4)
    turning = slice(0, 4) if first else slice(6, 10)
    expected = x.clone()
    expected[..., turning] = apply_rope(x[..., turning], cos, sin, interleaved=interleaved)
    for function in (rotate, rotate_reference):
        before = x.clone()
        y = function(x, cos, sin, interleaved=interleaved, first=first)
        assert torch.equal(y, expected)
        assert torch.equal(x, before)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.usefixtures("poisoned_empty")
@every_place
@every_way
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((0, 3, 8), 4),
        ((1, 2), 2),
        ((5, 8), 8),
        ((7, 9), 6),
        ((3, 0, 8), 4),
        ((9, 5, 24), 10),
        ((3, 2, 2, 6), 4),
        ((40, 16, 256), 64),
    ],
)
def test_the_kernel_has_the_bits_of_the_reference(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, interleaved: bool, first: bool
) -> None:
    check_bits(*inputs(*shape, dtype=dtype), dim, interleaved=interleaved, first=first)


@pytest.mark.gpu
@every_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "first"),
    [((8192, 64, 256), False), ((8192, 32, 128), True), ((8192, 128), True), ((8192, 64), True)],
)
def test_the_bits_at_the_sizes_of_the_model(
    shape: tuple[int, ...], first: bool, dtype: torch.dtype, interleaved: bool
) -> None:
    check_bits(*inputs(*shape, dtype=dtype), 64, interleaved=interleaved, first=first)


def error(pair: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> list[float]:
    return [(y.double() - true).abs().max().item() for y, true in zip(pair, exact, strict=True)]


@every_place
@every_way
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_plain_pytorch(
    dtype: torch.dtype, interleaved: bool, first: bool
) -> None:
    x, grad = inputs(33, 4, 24, dtype=dtype)
    how = {"interleaved": interleaved, "first": first}
    exact = run(rotate_reference, x.double(), grad.double(), 16, **how)
    theirs, ours = (run(f, x, grad, 16, **how) for f in (rotate_reference, rotate_fused))
    for mine, other, true in zip(error(ours, exact), error(theirs, exact), exact, strict=True):
        assert mine <= 2 * other + torch.finfo(dtype).eps * true.abs().max()


@every_place
@every_way
@pytest.mark.parametrize(
    "strided",
    [
        pytest.param(lambda x: x[..., 3:13], id="columns of a wider tensor"),
        pytest.param(lambda x: x[:, 1:3], id="some heads"),
        pytest.param(lambda x: x.transpose(0, 1), id="heads before tokens"),
        pytest.param(lambda x: x.mT, id="columns apart"),
        pytest.param(lambda x: x[:, :1].expand(-1, 4, -1), id="expanded"),
    ],
)
def test_any_strides(strided: Callable[[Tensor], Tensor], interleaved: bool, first: bool) -> None:
    x, grad = (strided(x) for x in inputs(6, 4, 16, dtype=torch.float32))
    check_bits(x, grad, 4, interleaved=interleaved, first=first)


@every_place
@every_way
def test_gradient_of_the_reference(interleaved: bool, first: bool) -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = rope_cos_sin(torch.arange(3), 4, 10.0)
    how = {"interleaved": interleaved, "first": first}
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, **how), x)


def test_what_passes_keeps_its_bits() -> None:
    x = torch.tensor([[torch.inf, -0.0, 1e-45, torch.nan, 1.0, 2.0]], device=DEVICE)
    y = rotate_fused(x, *tables(1, 2), interleaved=True, first=False)
    assert torch.equal(y[:, :4].view(torch.int32), x[:, :4].view(torch.int32))


@pytest.mark.gpu
def test_same_bits_twice() -> None:
    x, grad = inputs(8192, 64, 256, dtype=torch.bfloat16)
    first, second = (
        run(rotate_fused, x, grad, 64, interleaved=True, first=False) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "is_fused"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)]
)
def test_a_gpu_runs_the_kernel(
    dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(triton_rotation, "rotate_fused", lambda *args, **how: called.append(args))
    x, _ = inputs(3, 8, dtype=dtype)
    rotate(x, *tables(3, 4), interleaved=True, first=True)
    assert bool(called) == is_fused


@every_place
def test_wrong_sizes_raise(first: bool) -> None:
    for x in (torch.ones(3, 2), torch.ones(2, 8)):
        with pytest.raises(ConfigError, match="do not fit"):
            rotate(x, *rope_cos_sin(torch.arange(3), 4, THETA), interleaved=True, first=first)


def test_kernels_compile_for_hopper() -> None:
    report = compile_report("tests.ops.compile_elementwise")
    rotations = {name: kernel for name, kernel in report.items() if name.startswith("rotation")}
    assert len(rotations) == 6
    for kernel in rotations.values():
        assert not kernel["spilled_bytes"]
        assert not kernel["fused_adds"]
        # eight elements at a time
        assert kernel["wide_loads"]
        assert kernel["wide_stores"]
