"""The gap against plain formulas, what is not finite, and the report on the worst token."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5.errors import DivergedError, GapError
from glm5.rl.gap import Gap, GapLimits
from glm5.rl.gap_meter import GapMeter
from glm5.rl.rollout import Rollout
from glm5.runtime.distributed import default_device, ensure_distributed
from tests.rl.rollouts import LENGTHS, label_columns, made_rollout

ROLLOUTS = [made_rollout(number) for number in range(len(LENGTHS))]
MICRO_BATCHES = ((0, 1), (2, 3), (4,))


@pytest.fixture(autouse=True)
def _alone() -> None:
    ensure_distributed(default_device())


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in ids)


def measure(
    shift: dict[tuple[int, int], float] | None = None, *, scale: float = 0.0
) -> tuple[Gap, list[float]]:
    """The gap, and every d, where the trainer is off by noise of `scale`, or by shift[place]."""
    meter, differences = GapMeter(), []
    draw = torch.Generator().manual_seed(1)
    for numbers in MICRO_BATCHES:
        drawn, mask, sequences, positions = label_columns(numbers, [ROLLOUTS[n] for n in numbers])
        new = drawn + scale * torch.randn(drawn.shape, generator=draw)
        for i, place in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
            new[i] += (shift or {}).get(place, 0.0)
        differences += (new.double() - drawn.double())[mask].tolist()
        # what is masked must not matter
        meter.add(torch.where(mask, new, math.nan), drawn, mask, sequences, positions)
    return meter.reduce(dict(enumerate(ROLLOUTS)), len(ROLLOUTS)), differences


def test_numbers_are_those_of_the_formulas() -> None:
    gap, d = measure(scale=0.8)
    ratios = [math.exp(x) for x in d]
    count = sum(response for _, response in LENGTHS)
    assert gap.num_tokens == len(d) == count
    assert gap.num_non_finite == 0
    assert gap.abs_diff == pytest.approx(sum(map(abs, d)) / count)
    assert gap.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / count)
    assert gap.over_1_nat == sum(abs(x) > 1 for x in d) / count > 0
    expected = sum(ratios) ** 2 / (count * sum(r * r for r in ratios))
    assert gap.effective_sample_size == pytest.approx(expected)
    # 18 tokens: the median is the mean of the middle two, the first percentile near the lowest
    ordered = sorted(ratios)
    assert gap.ratio_quantiles == pytest.approx(
        {
            "min": ordered[0],
            "p01": 0.83 * ordered[0] + 0.17 * ordered[1],
            "p50": (ordered[8] + ordered[9]) / 2,
            "p99": 0.17 * ordered[-2] + 0.83 * ordered[-1],
            "max": ordered[-1],
        }
    )


def test_mean_of_each_rollout() -> None:
    gap, d = measure(scale=0.8)
    parts = np.split(np.abs(d), np.cumsum([response for _, response in LENGTHS])[:-1])
    np.testing.assert_allclose(gap.sequence_abs_diff, [part.mean() for part in parts])


def test_equal_log_probabilities_have_no_gap() -> None:
    gap, _ = measure()
    assert gap.abs_diff == gap.kl == gap.over_1_nat == 0
    assert gap.effective_sample_size == 1
    assert set(gap.ratio_quantiles.values()) == {1.0}
    GapLimits(max_kl=0.0, max_abs_diff=0.0).check(gap, 1, decode)


def test_the_worst_token_is_told_with_what_stands_before_it() -> None:
    # rollout 2 has a prompt of 12 tokens; position 13 is its last one
    gap, _ = measure({(2, 13): -3.0, (4, 8): 2.0})
    rollout = ROLLOUTS[2]
    ids = [*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]
    worst = gap.worst
    assert worst is not None
    assert (worst.request, worst.position, worst.token_id) == ("request-2", 13, ids[13])
    assert worst.rollout_log_prob == rollout.log_probs[1]
    assert worst.log_prob == pytest.approx(rollout.log_probs[1] - 3.0)
    assert worst.before == tuple(ids[3:13])
    with pytest.raises(GapError) as caught:
        GapLimits(max_kl=0.01).check(gap, 5, decode)
    message = str(caught.value)
    assert "tokens of step 5" in message and "is over max_kl 0.01" in message
    assert f'request request-2, position 13, token {ids[13]} "<{ids[13]}>"' in message
    assert f"{worst.log_prob:.6g} in the trainer" in message
    assert ", ".join(f'{i} "<{i}>"' for i in ids[3:13]) in message


def test_a_short_prompt_has_fewer_tokens_before() -> None:
    gap, _ = measure({(3, 1): 1.5})
    assert gap.worst is not None
    assert gap.worst.before == tuple(ROLLOUTS[3].prompt_ids.tolist())


def test_control_characters_in_a_token_are_escaped() -> None:
    gap, _ = measure({(3, 1): 1.5})
    with pytest.raises(GapError) as caught:
        GapLimits(max_abs_diff=0.0).check(gap, 1, lambda ids: "\x1b[2J\n\u202e")
    assert '"\\x1b[2J\\n\\u202e"' in str(caught.value)


def test_limits_say_which_one_is_exceeded() -> None:
    gap, _ = measure({(0, 4): 0.18})  # 0.01 nats on the mean of 18 tokens
    assert gap.abs_diff == pytest.approx(0.01)
    GapLimits().check(gap, 1, decode)
    GapLimits(max_kl=0.01, max_abs_diff=0.011).check(gap, 1, decode)
    exceeded = r"mean difference 0.01 is over max_abs_diff 0.009"
    with pytest.raises(GapError, match=exceeded) as caught:
        GapLimits(max_kl=0.01, max_abs_diff=0.009).check(gap, 1, decode)
    assert "max_kl" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1000.0])
def test_what_is_not_finite_is_counted_shown_and_refused(value: float) -> None:
    gap, _ = measure({(1, 5): value, (0, 4): 2.0})
    assert gap.num_non_finite == 1
    # never replaced by a number
    assert not math.isfinite(gap.kl)
    assert gap.worst is not None
    assert (gap.worst.request, gap.worst.position) == ("request-1", 5)
    with pytest.raises(DivergedError, match=r"1 of 18 log-probabilities"):
        GapLimits().check(gap, 1, decode)


def test_an_infinity_on_both_sides_is_no_agreement() -> None:
    log_probs = ROLLOUTS[3].log_probs.copy()
    log_probs[0] = -math.inf
    spoilt = replace(ROLLOUTS[3], log_probs=log_probs)
    drawn, *rest = label_columns([0], [spoilt])
    meter = GapMeter()
    meter.add(drawn.clone(), drawn, *rest)
    gap = meter.reduce({0: spoilt}, 1)
    assert gap.num_non_finite == 1 and math.isnan(gap.abs_diff)


def test_a_step_without_tokens() -> None:
    drawn, _, sequences, positions = label_columns([0], [ROLLOUTS[0]])
    masked = GapMeter()
    masked.add(drawn, drawn, torch.zeros_like(drawn, dtype=torch.bool), sequences, positions)
    for meter in (masked, GapMeter()):
        gap = meter.reduce({}, 2)
        assert gap.metrics() == {"gap_num_tokens": 0, "gap_num_non_finite": 0}
        assert gap.worst is None and np.isnan(gap.sequence_abs_diff).all()
        GapLimits(max_kl=0.0, max_abs_diff=0.0).check(gap, 1, decode)


def test_overlaps_are_shares_and_absent_where_nothing_was_replayed() -> None:
    meter = GapMeter()
    drawn, *rest = label_columns([0], [ROLLOUTS[0]])
    meter.add(drawn, drawn, *rest)
    assert "gap_routing_overlap" not in meter.reduce({0: ROLLOUTS[0]}, 1).metrics()
    meter.add_overlap("experts", torch.tensor([40, 30]))
    meter.add_overlap("experts", torch.tensor([10, 10]))
    meter.add_overlap("topk", torch.tensor([0, 0]))
    metrics = meter.reduce({0: ROLLOUTS[0]}, 1).metrics()
    assert metrics["gap_routing_overlap"] == 0.8
    assert "gap_topk_overlap" not in metrics


def test_metrics_hold_every_number() -> None:
    metrics = measure(scale=0.1)[0].metrics()
    quantiles = {f"gap_ratio_{name}" for name in ("min", "p01", "p50", "p99", "max")}
    others = {"abs_diff", "kl", "effective_sample_size", "over_1_nat", "num_tokens"}
    assert set(metrics) == quantiles | {f"gap_{name}" for name in (*others, "num_non_finite")}


def test_tokens_of_another_rollout_are_noticed() -> None:
    drawn, mask, sequences, positions = label_columns([0], [ROLLOUTS[0]])
    meter = GapMeter()
    meter.add(drawn, drawn, mask, sequences, positions)
    swapped: dict[int, Rollout] = {0: replace(ROLLOUTS[0], log_probs=ROLLOUTS[0].log_probs - 1)}
    with pytest.raises(AssertionError, match="out of step"):
        meter.reduce(swapped, 1)


def test_large_numbers_of_tokens_lose_no_precision() -> None:
    count = 2**24 + 1
    mask = torch.ones(2, dtype=torch.bool)
    long = replace(
        ROLLOUTS[0],
        prompt_ids=np.zeros(count, np.int32),
        response_ids=np.arange(2, dtype=np.int32),
        log_probs=np.zeros(2, np.float32),
    )
    meter = GapMeter()
    new: Tensor = torch.tensor([0.0, 1.0])
    meter.add(new, torch.zeros(2), mask, torch.zeros(2, dtype=torch.long), count + torch.arange(2))
    worst = meter.reduce({0: long}, 1).worst
    assert worst is not None and worst.position == count + 1
