"""The clipped policy-gradient loss of each token, and what there is to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.errors import DivergedError


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens of a micro-batch, or of one rank's part of it.

    log_probs [t] fp32: of the weights that train, with gradient. old_log_probs [t]: of the trainer
    before the step's first update. rollout_log_probs [t]: of the engine that drew the tokens.
    ref_log_probs [t]: of the reference, None without a KL term. advantages [t] fp32. mask [t] bool,
    True at response tokens; whatever stands elsewhere has no effect, were it NaN. entropy [t]: of
    the distributions of log_probs, without gradient.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """loss = w max(-ratio A, -clip(ratio) A) + kl_coeff k3, for every response token.

    ratio = exp(log_probs - old_log_probs), clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: c > 1; where A < 0 the loss of the policy is at most -c A (arXiv 1912.09729).
    w = clamp(exp(old_log_probs - rollout_log_probs), is_low, is_high), without gradient: truncated
    importance sampling for tokens that another program drew. Both bounds None: w = 1.
    k3 = exp(ref - log_probs) - 1 - (ref - log_probs), an estimate of KL(trained || reference) that
    is never negative; it is not multiplied by w.

    No logarithm of a ratio is clamped: one that overflows is counted in `num_non_finite`, which
    `check_finite` refuses, and the step must not be taken.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coeff: float = 0.0
    is_low: float | None = None
    is_high: float | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.clip_low <= 1 and self.clip_high >= 0 and self.kl_coeff >= 0
        assert self.dual_clip is None or self.dual_clip > 1
        assert self.is_low is None or self.is_high is None or self.is_low <= self.is_high

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """(losses [t] fp32, 0 where masked; sums over the response tokens for `mean_metrics`).

        Sums are fp64 scalars without gradient, which may be added over micro-batches and ranks.
        """
        ratio = _masked_exp(tokens.log_probs - tokens.old_log_probs, tokens.mask)
        weights = _masked_exp(tokens.old_log_probs - tokens.rollout_log_probs, tokens.mask).detach()
        advantages = torch.where(tokens.mask, tokens.advantages, 0)
        losses = self._clipped(ratio, advantages) * self._truncated(weights)
        found = {"ratio": ratio, "is_weight": weights}
        if tokens.ref_log_probs is not None:
            found["ref_kl"] = k3(tokens.ref_log_probs - tokens.log_probs, tokens.mask)
            losses = losses + self.kl_coeff * found["ref_kl"]
        else:
            assert not self.kl_coeff, "a KL term needs the reference's log-probabilities"
        losses = torch.where(tokens.mask, losses, 0)
        with torch.no_grad():
            return losses, self._sums(tokens, advantages, losses, found)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = torch.maximum(-ratio * advantages, -clipped * advantages)
        if self.dual_clip is None:
            return losses
        return torch.where(
            advantages < 0, torch.minimum(losses, -self.dual_clip * advantages), losses
        )

    def _truncated(self, weights: Tensor) -> Tensor:
        if self.is_low is None and self.is_high is None:
            return torch.ones_like(weights)
        return weights.clamp(self.is_low, self.is_high)

    def _sums(
        self, tokens: PolicyTokens, advantages: Tensor, losses: Tensor, found: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        mask, ratio = tokens.mask, found["ratio"]
        log_ratio = tokens.log_probs - tokens.old_log_probs
        down, up = advantages < 0, advantages > 0
        finite = losses.isfinite()
        for values in found.values():
            # clipping may hide that they overflowed
            finite = finite & values.isfinite()
        per_token = {
            "num_tokens": torch.ones_like(ratio),
            "num_non_finite": ~finite,
            "clip_low": down & (ratio < 1 - self.clip_low),
            "clip_high": up & (ratio > 1 + self.clip_high),
            "kl_k1": -log_ratio,
            "kl_k3": ratio - 1 - log_ratio,
            "entropy": tokens.entropy,
            "is_clamped": self._truncated(found["is_weight"]) != found["is_weight"],
            **found,
        }
        if self.dual_clip is not None:
            per_token["clip_dual"] = down & (ratio > self.dual_clip)
        if self.is_low is None and self.is_high is None:
            del per_token["is_clamped"]
        return {name: _sum(values, mask) for name, values in per_token.items()}


def k3(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """exp(x) - 1 - x, and 0 where masked; x = log(q / p) at tokens of p: estimates KL(p || q)."""
    log_ratio = torch.where(mask, log_ratio, 0)
    return log_ratio.exp() - 1 - log_ratio


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over response tokens from sums over all micro-batches and ranks.

    ratio; clip_low, clip_high, clip_dual: shares of tokens whose gradient a clip takes away; kl_k1,
    kl_k3: estimates of KL(old || trained), the first one signed; ref_kl; entropy [nats]; is_weight
    before it is clamped and is_clamped, the share that clamping changes; num_tokens and
    num_non_finite are counts. Without a token there are the counts alone.
    """
    counts = {name: sums[name] for name in ("num_tokens", "num_non_finite")}
    if not counts["num_tokens"]:
        return counts
    means = {name: total / counts["num_tokens"] for name, total in sums.items()}
    return means | counts


def check_finite(metrics: Mapping[str, float], step: int) -> None:
    """To be called on the sums over all ranks, before the optimizer takes the step.

    Raises:
        DivergedError: a loss or a ratio is not a finite number.
    """
    if metrics["num_non_finite"]:
        raise DivergedError(
            f"the policy loss of step {step} is not finite",
            got=f"{metrics['num_non_finite']:.0f} of {metrics['num_tokens']:.0f} response tokens",
            expected="finite losses, and ratios of probabilities that do not overflow",
            remedy="lower optimizer.lr; see whether the gap between engine and trainer grew before",
        )


def _masked_exp(log_ratio: Tensor, mask: Tensor) -> Tensor:
    # a ratio of 1 where masked: its gradient must be a number
    return torch.where(mask, log_ratio, 0).exp()


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.double(), 0).sum()
