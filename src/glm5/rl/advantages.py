"""Group-relative advantages (GRPO, arXiv 2402.03300): how much better than its siblings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm5.errors import RewardError

Rewards = NDArray[np.float64]

STD_EPS = 1e-6


def teaches(rewards: Rewards) -> bool:
    """Whether the rewards [n] of one group say anything: some completion is better than another.

    Not so where all are equal, nor where fewer than two completions are left because others failed.
    Such groups must be dropped or sampled again before `group_advantages`, or count as zeros.

    Raises:
        RewardError: a reward that is not a finite number.
    """
    _check_finite(rewards)
    # the std of equal numbers may be off zero by rounding
    return len(rewards) > 1 and bool(rewards.max() > rewards.min())


def group_advantages(groups: Sequence[Rewards], *, divide_by_std: bool) -> list[Rewards]:
    """A = r - mean, divided by (std + 1e-6) where asked for; exactly 0 where all are equal.

    groups: rewards [n_g] float64 of the completions of each prompt, n_g >= 2. Mean and std are over
    those that are there: a group that lost some to a failure is a smaller group. The std is the
    unbiased one, with n_g - 1 below. Without the division this is Dr. GRPO (arXiv 2503.20783),
    whose gradient does not favour prompts on which nearly all completions agree.

    Raises:
        RewardError: a group of one, which has nothing to be compared with, or none; a reward that
            is not a finite number.
    """
    return [_advantages(index, rewards, divide_by_std) for index, rewards in enumerate(groups)]


def _advantages(index: int, rewards: Rewards, divide_by_std: bool) -> Rewards:
    if len(rewards) < 2:
        raise RewardError(
            f"group {index} is too small for advantages",
            got=f"{len(rewards)} completion(s)",
            expected="at least 2 of the same prompt",
            remedy="sample more completions per prompt; drop groups that failures left alone",
        )
    if not teaches(rewards):
        return np.zeros_like(rewards)
    above_mean = rewards - rewards.mean()
    return above_mean / (rewards.std(ddof=1) + STD_EPS) if divide_by_std else above_mean


def _check_finite(rewards: Rewards) -> None:
    if not np.isfinite(rewards).all():
        raise RewardError("a reward is not a finite number", got=rewards.tolist())
