"""Advantages against the formula, groups that teach nothing, and rewards that are no numbers."""

import math
import statistics

import numpy as np
import pytest
from numpy.typing import NDArray

from glm5.errors import RewardError
from glm5.rl.advantages import group_advantages, teaches


def group(*rewards: float) -> NDArray[np.float64]:
    return np.array(rewards, dtype=np.float64)


def test_groups_of_any_size_match_the_formula() -> None:
    groups = [group(1, 0, 0, 1), group(0.25, -3, 7), group(2, 1)]
    for rewards, found in zip(groups, group_advantages(groups, divide_by_std=True), strict=True):
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        np.testing.assert_allclose(found, [(r - mean) / (std + 1e-6) for r in rewards], rtol=1e-12)
        assert abs(found.sum()) < 1e-12


def test_without_the_std_they_are_distances_from_the_mean() -> None:
    (found,) = group_advantages([group(4, 0, 2)], divide_by_std=False)
    assert found.tolist() == [2.0, -2.0, 0.0]


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e300])
def test_equal_rewards_teach_nothing(value: float, divide_by_std: bool) -> None:
    rewards = group(*[value] * 3)
    assert not teaches(rewards)
    (found,) = group_advantages([rewards], divide_by_std=divide_by_std)
    assert found.tolist() == [0.0] * 3


def test_rounding_alone_would_not_call_equal_rewards_equal() -> None:
    assert group(0.1, 0.1, 0.1).std(ddof=1) > 0


def test_the_smallest_difference_teaches() -> None:
    rewards = group(1.0, np.nextafter(1.0, 2.0))
    assert teaches(rewards)
    assert np.abs(group_advantages([rewards], divide_by_std=True)[0]).max() > 0


def test_a_completion_alone_teaches_nothing_and_has_no_advantage() -> None:
    for rewards in (group(1.0), group()):
        assert not teaches(rewards)
        with pytest.raises(RewardError, match="group 1 is too small"):
            group_advantages([group(0, 1), rewards], divide_by_std=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_no_numbers_raise(bad: float) -> None:
    with pytest.raises(RewardError, match="not a finite number"):
        group_advantages([group(0, bad)], divide_by_std=False)
    with pytest.raises(RewardError, match="not a finite number"):
        teaches(group(bad))
