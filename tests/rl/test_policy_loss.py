"""The loss against a loop over tokens, its gradient against differences, and what it reports."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.errors import DivergedError
from glm5.rl.policy_loss import PolicyLoss, PolicyTokens, check_finite, mean_metrics

LOSSES = {
    "plain": PolicyLoss(),
    "symmetric": PolicyLoss(clip_low=0.2, clip_high=0.2),
    "dual": PolicyLoss(dual_clip=1.5),
    "kl": PolicyLoss(kl_coeff=0.3),
    "truncated": PolicyLoss(is_low=0.7, is_high=1.4),
    "truncated above": PolicyLoss(is_high=1.1),
    "all": PolicyLoss(dual_clip=1.5, kl_coeff=0.3, is_low=0.7, is_high=1.4),
}


def draw(count: int = 200, *, spread: float = 0.5, dtype: torch.dtype = torch.float32) -> Any:
    """Ratios on both sides of every clip, advantages of both signs and 0, a third masked."""
    generator = torch.Generator().manual_seed(3)

    def near(x: Tensor) -> Tensor:
        return x + spread * torch.randn(count, generator=generator, dtype=dtype)

    old = -2 * torch.rand(count, generator=generator, dtype=dtype) - 0.1
    return PolicyTokens(
        log_probs=near(old).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=near(old),
        ref_log_probs=near(old),
        advantages=torch.randint(-2, 3, (count,), generator=generator).to(dtype),
        mask=torch.rand(count, generator=generator) < 0.67,
        entropy=torch.rand(count, generator=generator, dtype=dtype),
    )


def by_loop(loss: PolicyLoss, tokens: PolicyTokens) -> tuple[list[float], dict[str, float]]:
    """The definition, token by token, in Python's floats."""
    losses, sums = [], dict.fromkeys(("clip_low", "clip_high", "clip_dual", "is_clamped"), 0.0)
    sums |= dict.fromkeys(("ratio", "is_weight", "kl_k1", "kl_k3", "ref_kl", "entropy"), 0.0)
    assert tokens.ref_log_probs is not None
    for i, counts in enumerate(tokens.mask.tolist()):
        if not counts:
            losses.append(0.0)
            continue
        new, old, drawn, ref, advantage, entropy = (
            float(x[i].detach())
            for x in (
                tokens.log_probs,
                tokens.old_log_probs,
                tokens.rollout_log_probs,
                tokens.ref_log_probs,
                tokens.advantages,
                tokens.entropy,
            )
        )
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        value = max(-ratio * advantage, -clipped * advantage)
        sums["clip_low"] += advantage < 0 and ratio < 1 - loss.clip_low
        sums["clip_high"] += advantage > 0 and ratio > 1 + loss.clip_high
        if loss.dual_clip is not None and advantage < 0:
            value = min(value, -loss.dual_clip * advantage)
            sums["clip_dual"] += ratio > loss.dual_clip
        weight = math.exp(old - drawn)
        sums["is_weight"] += weight
        if loss.is_low is not None or loss.is_high is not None:
            low = -math.inf if loss.is_low is None else loss.is_low
            high = math.inf if loss.is_high is None else loss.is_high
            sums["is_clamped"] += not low <= weight <= high
            value *= min(max(weight, low), high)
        kl = math.exp(ref - new) - 1 - (ref - new)
        sums["ref_kl"] += kl
        sums["ratio"] += ratio
        sums["kl_k1"] += old - new
        sums["kl_k3"] += ratio - 1 - (new - old)
        sums["entropy"] += entropy
        losses.append(value + loss.kl_coeff * kl)
    return losses, sums


def floats(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_metrics_match_a_loop(name: str) -> None:
    loss, tokens = LOSSES[name], draw()
    losses, sums = loss(tokens)
    expected, expected_sums = by_loop(loss, tokens)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    found = mean_metrics(floats(sums))
    count = int(tokens.mask.sum())
    assert found.pop("num_tokens") == count
    assert found.pop("num_non_finite") == 0
    assert ("clip_dual" in found) == (loss.dual_clip is not None)
    assert ("is_clamped" in found) == (loss.is_low is not None or loss.is_high is not None)
    for key, value in found.items():
        assert value == pytest.approx(expected_sums[key] / count, rel=1e-5), key
    # the cases are there at all
    assert all(expected_sums[key] != 0 for key in found)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_differences_in_fp64(name: str) -> None:
    # 200 random ratios: none is within 1e-6 of a corner of the clips
    tokens = draw(dtype=torch.float64)
    loss = LOSSES[name]

    def losses_of(log_probs: Tensor) -> Tensor:
        return loss(replace(tokens, log_probs=log_probs))[0]

    assert torch.autograd.gradcheck(losses_of, (tokens.log_probs,), eps=1e-7, atol=1e-5)


def test_on_policy_the_gradient_is_that_of_plain_policy_gradients() -> None:
    tokens = draw()
    tokens = replace(tokens, old_log_probs=tokens.log_probs.detach())
    losses, sums = PolicyLoss()(tokens)
    losses.sum().backward()
    expected = torch.where(tokens.mask, -tokens.advantages, 0)
    torch.testing.assert_close(tokens.log_probs.grad, expected, rtol=0, atol=0)
    found = mean_metrics(floats(sums))
    assert found["kl_k1"] == found["kl_k3"] == found["clip_low"] == found["clip_high"] == 0
    assert found["ratio"] == 1


def test_clipped_tokens_have_no_gradient() -> None:
    tokens = draw()
    losses, _ = PolicyLoss(dual_clip=1.5)(tokens)
    losses.sum().backward()
    ratio, a = (tokens.log_probs - tokens.old_log_probs).exp(), tokens.advantages
    clipped = ((a < 0) & (ratio < 0.8)) | ((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio > 1.5))
    assert clipped[tokens.mask].any()
    moved = tokens.log_probs.grad != 0
    assert torch.equal(moved, tokens.mask & (a != 0) & ~clipped)


def test_the_weights_of_truncation_carry_no_gradient() -> None:
    tokens = draw()
    old = tokens.old_log_probs.clone().requires_grad_()
    losses, _ = PolicyLoss(is_low=0.7, is_high=1.4)(replace(tokens, old_log_probs=old))
    losses.sum().backward()
    # only the ratio's share is left: d ratio / d old = - d ratio / d new
    torch.testing.assert_close(old.grad, -tokens.log_probs.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_positions_may_hold_anything(bad: float) -> None:
    loss = LOSSES["all"]
    tokens = draw()
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    spoilt = {
        name: torch.where(tokens.mask, getattr(tokens, name).detach(), bad)
        for name in (*names, "entropy")
    }
    spoilt["log_probs"].requires_grad_()
    losses, sums = loss(replace(tokens, **spoilt))
    expected, expected_sums = loss(tokens)
    assert torch.equal(losses, expected)
    assert floats(sums) == floats(expected_sums)
    losses.sum().backward()
    expected.sum().backward()
    assert torch.equal(spoilt["log_probs"].grad, tokens.log_probs.grad)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_probs", math.nan),
        ("log_probs", -math.inf),
        ("log_probs", 200.0),
        ("old_log_probs", -200.0),
        ("rollout_log_probs", math.nan),
        ("rollout_log_probs", -200.0),
        ("ref_log_probs", 200.0),
    ],
)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_what_is_not_finite_is_counted_and_refused(
    name: str, value: float, advantage: float
) -> None:
    # a positive advantage hides an overflowing ratio behind the clip, and so does truncation
    tokens = draw()
    first = int(tokens.mask.nonzero()[0])
    changed = getattr(tokens, name).detach().clone()
    changed[first] = value
    advantages = tokens.advantages.clone()
    advantages[first] = advantage
    _, sums = LOSSES["all"](replace(tokens, advantages=advantages, **{name: changed}))
    found = mean_metrics(floats(sums))
    assert found["num_non_finite"] == 1
    with pytest.raises(DivergedError, match=r"step 7(.|\n)*1 of \d+ response tokens"):
        check_finite(found, 7)


def test_finite_metrics_pass_and_sums_of_parts_are_the_sum() -> None:
    loss, tokens = LOSSES["all"], draw()
    _, whole = loss(tokens)
    parts = []
    for piece in (slice(0, 60), slice(60, 61), slice(61, 200)):
        cut = {name: getattr(tokens, name)[piece] for name in PolicyTokens.__dataclass_fields__}
        parts.append(floats(loss(PolicyTokens(**cut))[1]))
    for name, value in floats(whole).items():
        assert sum(part[name] for part in parts) == pytest.approx(value, rel=1e-12), name
    check_finite(mean_metrics(floats(whole)), 1)


def test_no_response_token_gives_counts_alone() -> None:
    tokens = draw()
    losses, sums = PolicyLoss()(replace(tokens, mask=torch.zeros_like(tokens.mask)))
    assert not losses.any()
    assert mean_metrics(floats(sums)) == {"num_tokens": 0.0, "num_non_finite": 0.0}
    losses.sum().backward()
    assert not tokens.log_probs.grad.any()


def test_without_a_reference_there_is_no_kl() -> None:
    tokens = replace(draw(), ref_log_probs=None)
    assert "ref_kl" not in PolicyLoss()(tokens)[1]
    with pytest.raises(AssertionError, match="reference"):
        PolicyLoss(kl_coeff=0.1)(tokens)
