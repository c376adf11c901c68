"""Log-probabilities against fp64, their gradient, their and their memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm5.errors import DataError
from glm5.rl.log_probs import token_log_probs
from glm5.runtime.distributed import default_device, ensure_distributed
from tests.ops.memory import measure_memory

VOCAB = 1000
TEMPERATURES = (1.0, 0.7, 1.3)


@pytest.fixture(autouse=True)
def _alone() -> None:
    ensure_distributed(default_device())


def draw(count: int = 41, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits up to about 40, and targets: a fifth -1, then the likeliest and a hopeless one."""
    generator = torch.Generator().manual_seed(5)
    logits = (10 * torch.randn(count, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(VOCAB, (count,), generator=generator)
    targets[::5] = -1
    targets[1], targets[2] = logits[1].argmax(), logits[2].argmin()
    return logits, targets


def ours(logits: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"temperature": 1.0, "chunk_tokens": 7, "group": dist.group.WORLD} | options
    return token_log_probs(logits, targets, **options)


def expected(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """In fp64, 0 where the target is -1."""
    log_probs = torch.log_softmax(logits.double() / temperature, dim=1)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    chosen = log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    asked = targets >= 0
    return torch.where(asked, chosen, 0), torch.where(asked, entropy, 0)


def assert_rounded(got: Tensor, exact: Tensor, scale: float) -> None:
    """Within a few fp32 roundings of numbers of that size."""
    assert got.dtype == torch.float32
    error = float((got.double() - exact).abs().max())
    assert error <= 4 * torch.finfo(torch.float32).eps * scale, error


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_values_are_those_of_fp64(
    dtype: torch.dtype, temperature: float, chunk_tokens: int
) -> None:
    logits, targets = draw(dtype=dtype)
    found = ours(logits, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    for got, exact in zip(found, expected(logits, targets, temperature), strict=True):
        assert_rounded(got, exact, scale=float(logits.abs().max()) / temperature)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_fp64(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = draw(dtype=dtype)
    factors = torch.randn(len(targets))
    logits.requires_grad_()
    (ours(logits, targets, temperature=temperature)[0] * factors).sum().backward()
    exact = logits.detach().double().requires_grad_()
    (expected(exact, targets, temperature)[0] * factors).sum().backward()
    assert logits.grad is not None and exact.grad is not None
    assert logits.grad.dtype == dtype
    rounding = torch.finfo(dtype).eps + 100 * torch.finfo(torch.float32).eps
    error = (logits.grad.double() - exact.grad).abs()
    # relative to each element, but for those that an fp32 subtraction from 1 makes small
    assert bool((error <= rounding * exact.grad.abs() + 1e-6).all())
    assert not logits.grad[targets < 0].any()


def test_entropy_has_no_gradient() -> None:
    logits, targets = draw()
    log_probs, entropy = ours(logits.requires_grad_(), targets)
    assert log_probs.requires_grad and not entropy.requires_grad


def test_logits_survive_and_can_be_used_twice() -> None:
    logits, targets = draw()
    before = logits.clone()
    first, second = (ours(logits, targets, temperature=0.7)[0] for _ in range(2))
    assert torch.equal(logits, before) and torch.equal(first, second)


@pytest.mark.parametrize("targets", [torch.full((5,), -1), torch.zeros(0, dtype=torch.long)])
def test_nothing_asked_for_gives_zeros(targets: Tensor) -> None:
    logits = torch.full((len(targets), VOCAB), float("nan"), requires_grad=True)
    log_probs, entropy = ours(logits, targets)
    assert not log_probs.any() and not entropy.any() and log_probs.shape == targets.shape
    log_probs.sum().backward()
    assert logits.grad is not None and not logits.grad.any()


def test_a_spoilt_row_spoils_no_other_and_is_not_hidden() -> None:
    logits, targets = draw()
    exact, _ = ours(logits, targets)
    logits[1, 3], logits[2, 4], logits[0] = float("nan"), float("inf"), float("nan")
    log_probs, entropy = ours(logits, targets)
    for values in (log_probs, entropy):
        assert values[1].isnan() and values[2].isnan() and values[0] == 0
    assert torch.equal(log_probs[3:], exact[3:])


def test_a_token_outside_the_vocabulary_raises() -> None:
    logits, targets = draw()
    targets[4] = VOCAB
    with pytest.raises(DataError, match=f"id {VOCAB}"):
        ours(logits, targets)


def test_no_more_than_a_chunk_is_in_fp32() -> None:
    count, chunk_tokens = 256, 8
    logits = torch.randn(count, VOCAB).bfloat16().requires_grad_()
    targets = torch.randint(VOCAB, (count,))

    def both() -> None:
        ours(logits, targets, chunk_tokens=chunk_tokens)[0].sum().backward()

    both()
    logits.grad = None
    _, memory = measure_memory(both)
    whole_bf16, chunk_fp32 = 2 * count * VOCAB, 4 * chunk_tokens * VOCAB
    assert memory.largest_bytes == whole_bf16  # the gradient itself
    assert memory.peak_bytes <= whole_bf16 + 4 * chunk_fp32


def test_rows_that_are_not_asked_for_take_no_memory() -> None:
    logits, targets = draw(count=400)
    targets[10:] = -1
    with torch.no_grad():
        _, memory = measure_memory(lambda: ours(logits, targets, chunk_tokens=400))
    assert memory.largest_bytes <= 4 * 10 * VOCAB
