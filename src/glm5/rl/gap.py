"""How far the trainer's log-probabilities are from the engine's, and what is too far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm5.errors import DivergedError, GapError
from glm5.model.replay import Stream
from glm5.rl.printable import printable

_OVERLAP_NAMES: dict[Stream, str] = {
    "experts": "gap_routing_overlap",
    "topk": "gap_topk_overlap",
}


@dataclass(frozen=True)
class WorstToken:
    """The token at which |trainer - engine| is largest; one that is NaN is larger than any.

    position: its index in prompt and response together. before: ids of up to 10 tokens before it.
    """

    request: str
    position: int
    token_id: int
    log_prob: float
    rollout_log_prob: float
    before: tuple[int, ...]

    def describe(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Several lines on it; decode(ids) -> text."""

        def show(token_id: int) -> str:
            return f'{token_id} "{printable(decode([token_id]))}"'

        return "\n    ".join(
            [
                f"request {self.request}, position {self.position}, token {show(self.token_id)}",
                f"log-probability {self.rollout_log_prob:.6g} in the engine, "
                f"{self.log_prob:.6g} in the trainer",
                f"after {', '.join(show(token_id) for token_id in self.before)}",
            ]
        )


@dataclass(frozen=True)
class Gap:
    """The gap over the response tokens of a step, the same on every rank.

    d = trainer's log-probability - engine's [nats]; ratio = exp(d), the importance ratio.
    abs_diff: mean |d|. kl: mean of ratio - 1 - d, an estimate of KL(engine || trainer) (k3).
    ratio_quantiles: exact, min, p01, p50, p99 and max, linear between neighbours.
    effective_sample_size: (sum ratio)^2 / (n sum ratio^2), in (0, 1]. over_1_nat: share of tokens
    with |d| > 1. num_non_finite: tokens whose d or ratio is no finite number; they are in all
    the other numbers, too. sequence_abs_diff [num_sequences] float64: mean |d| of each rollout, NaN
    for one that has no token in the step. overlaps: share of the rollout's choices that the
    trainer would have made itself, for what was replayed.
    """

    num_tokens: int
    num_non_finite: int
    abs_diff: float
    kl: float
    ratio_quantiles: dict[str, float]
    effective_sample_size: float
    over_1_nat: float
    sequence_abs_diff: NDArray[np.float64]
    overlaps: dict[Stream, float]
    worst: WorstToken | None

    def metrics(self) -> dict[str, float]:
        """For the log; a step without response tokens has the counts alone."""
        counts: dict[str, float] = {
            "gap_num_tokens": self.num_tokens,
            "gap_num_non_finite": self.num_non_finite,
        }
        if not self.num_tokens:
            return counts
        quantiles = {f"gap_ratio_{name}": value for name, value in self.ratio_quantiles.items()}
        overlaps = {_OVERLAP_NAMES[kind]: share for kind, share in self.overlaps.items()}
        return {
            "gap_abs_diff": self.abs_diff,
            "gap_kl": self.kl,
            **quantiles,
            "gap_effective_sample_size": self.effective_sample_size,
            "gap_over_1_nat": self.over_1_nat,
            **overlaps,
            **counts,
        }


@dataclass(frozen=True)
class GapLimits:
    """What a run stops at: the mean |d| and the KL of a step [nats]; None: no limit."""

    max_kl: float | None = None
    max_abs_diff: float | None = None

    def check(self, gap: Gap, step: int, decode: Callable[[Sequence[int]], str]) -> None:
        """To be called before the step is taken, on every rank.

        Raises:
            GapError: the gap is over a limit; with all there is to know about the worst token.
            DivergedError: the same, where a log-probability is no finite number.
        """
        problems = self._exceeded(gap)
        if gap.num_non_finite:
            count = f"{gap.num_non_finite} of {gap.num_tokens}"
            problems.insert(0, f"{count} log-probabilities or their ratios are not finite")
        if not problems:
            return
        assert gap.worst is not None
        # weights that give such numbers are not worth saving
        kind = DivergedError if gap.num_non_finite else GapError
        raise kind(
            f"engine and trainer disagree on the tokens of step {step}",
            got="; ".join(problems) + f"\n    worst token: {gap.worst.describe(decode)}",
            expected="the same log-probabilities but for rounding",
            remedy="see that the engine has this step's weights, samples at the trainer's "
            "temperature with top_p 1, and uses the trainer's norm eps; replay its choices",
        )

    def _exceeded(self, gap: Gap) -> list[str]:
        limits = (
            ("KL", gap.kl, "max_kl", self.max_kl),
            ("mean difference", gap.abs_diff, "max_abs_diff", self.max_abs_diff),
        )
        return [
            f"{what} {value:.4g} is over {name} {limit:g}"
            for what, value, name, limit in limits
            if limit is not None and value > limit
        ]
