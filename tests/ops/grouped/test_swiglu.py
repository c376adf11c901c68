"""The fused SwiGLU; without a GPU in Triton's interpreter, which tests/conftest.py switches on."""

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.ops.grouped.gated import weighted_swiglu_reference
from glm5.ops.grouped.swiglu import weighted_swiglu_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plain(gate_up: Tensor, probs: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up * probs[:, None].to(gate_up.dtype)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "width"), [(0, 4), (1, 1), (5, 7), (3, 2050)])
def test_error_is_at_most_twice_that_of_plain_pytorch(
    t: int, width: int, dtype: torch.dtype
) -> None:
    gate_up, probs = torch.randn(t, 2 * width, device=DEVICE), torch.rand(t, device=DEVICE)
    gate_up, grad = gate_up.to(dtype), torch.randn(t, width, device=DEVICE).to(dtype)

    def run(function, as_dtype: torch.dtype, probs_dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = gate_up.to(as_dtype).requires_grad_(), probs.to(probs_dtype).requires_grad_()
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(as_dtype))

    exact = run(plain, torch.float64, torch.float64)
    theirs = run(plain, dtype, torch.float32)
    ours = run(weighted_swiglu_fused, dtype, torch.float32)
    assert [x.dtype for x in ours] == [dtype, dtype, torch.float32]
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        if true.numel():
            rounding = torch.finfo(mine.dtype).eps * true.abs().max()
            my_error, their_error = ((x.double() - true).abs().max() for x in (mine, other))
            assert my_error <= 2 * their_error + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_reference_rounds_once(dtype: torch.dtype) -> None:
    gate_up, probs = torch.randn(5, 6).to(dtype), torch.rand(5)
    exact = plain(gate_up.double(), probs.double())
    torch.testing.assert_close(
        weighted_swiglu_reference(gate_up, probs),
        exact.to(dtype),
        rtol=torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12,
        atol=0,
    )
