"""Tokens are drawn from the distribution that is said, and so is their log-probability."""

import math

import pytest
import torch
from torch import Tensor

from glm5.rl.engines.draw import draw_tokens

LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.0, -30.0])


def draw(uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = LOGITS.expand(len(uniforms), -1)
    return draw_tokens(logits, uniforms, temperature=temperature, top_p=top_p)


def evenly(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    tokens, log_probs = draw(evenly(20_000), temperature)
    expected = torch.softmax(LOGITS / temperature, -1)
    assert torch.allclose(tokens.bincount(minlength=5) / 20_000, expected, atol=1e-3)
    assert torch.allclose(log_probs, expected.log()[tokens], atol=1e-6)
    assert log_probs.dtype == torch.float32


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.softmax(LOGITS, -1)  # order: 0, 2, 3, 1, 4
    both = float(probabilities[0] + probabilities[2])
    for top_p, kept in ((both - 1e-3, {0, 2}), (both + 1e-3, {0, 2, 3}), (1e-9, {0})):
        tokens, log_probs = draw(evenly(2_000), top_p=top_p)
        assert set(tokens.tolist()) == kept
        # those of all tokens, not of the kept ones
        assert torch.allclose(log_probs, probabilities.log()[tokens], atol=1e-6)


def test_the_ends_of_the_uniform_range_draw_tokens_that_have_a_chance() -> None:
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    logits = torch.tensor([-math.inf, 0.0, 1.0, -math.inf]).expand(2, -1)
    tokens, _ = draw_tokens(logits, ends, temperature=1.0, top_p=1.0)
    assert tokens.tolist() == [1, 2]


def test_a_row_of_nan_is_seen_in_its_log_probability_alone() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, math.nan)])
    tokens, log_probs = draw_tokens(logits, evenly(2), temperature=1.0, top_p=0.9)
    assert log_probs.isnan().tolist() == [False, True]
    assert 0 <= int(tokens[1]) < 5
