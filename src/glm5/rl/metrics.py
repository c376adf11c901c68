"""The metrics of a step of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from glm5.rl.collect import Collected
from glm5.rl.passes import COUNT, LOSS
from glm5.rl.policy_loss import mean_metrics

_COUNTS = ("num_tokens", "num_non_finite")


def collected_metrics(collected: Collected) -> dict[str, float]:
    """What was sampled, groups that teach nothing among it.

    reward: mean over all completions; groups_taught: share of groups whose rewards differ;
    completion_tokens: mean length; truncated: share of completions that were cut; reward_failures:
    comparisons that took too long, whose completions had the reward 0.
    """
    rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
    rewards = np.concatenate([group.rewards for group in collected.groups])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_failures": collected.reward_failures,
        "groups": len(collected.groups),
        "groups_taught": float(np.mean([group.teaches for group in collected.groups])),
        "completion_tokens": float(np.mean([len(rollout.response_ids) for rollout in rollouts])),
        "truncated": float(np.mean([rollout.finish == "length" for rollout in rollouts])),
        "rollout_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
        "rollout_seconds": collected.rollout_seconds,
        "reward_seconds": collected.reward_seconds,
    }


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Of the sums of all updates of a step: `loss`, and the means of `mean_metrics`."""
    of_tokens = {name: value for name, value in sums.items() if name not in (LOSS, COUNT)}
    means = {name: v for name, v in mean_metrics(of_tokens).items() if name not in _COUNTS}
    return {
        "loss": sums[LOSS] / sums[COUNT],
        "trained_tokens": sums["num_tokens"],
        **{f"policy_{name}": value for name, value in means.items()},
    }
