"""Made-up rollouts, and their tokens as a packed micro-batch would hold them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glm5.rl.rollout import Rollout

# name -> (tokens of the prompt, of the response)
LENGTHS = ((4, 3), (2, 7), (12, 2), (1, 1), (6, 5))


def made_rollout(number: int, *, seed: int = 0) -> Rollout:
    """The rollout of that number, of LENGTHS' size."""
    draw = np.random.default_rng([seed, number])
    prompt, response = LENGTHS[number]
    return Rollout(
        request=f"request-{number}",
        prompt_ids=draw.integers(0, 100, prompt).astype(np.int32),
        response_ids=draw.integers(100, 200, response).astype(np.int32),
        log_probs=-draw.exponential(1.0, response).astype(np.float32),
        finish="stop",
        choices=None,
        adapter_version=0,
    )


def label_columns(
    numbers: Sequence[int], rollouts: Sequence[Rollout]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probabilities of the engine, mask, number, position) of each label, [t].

    Token i of a document predicts token i + 1; its last token predicts nothing.
    """
    parts = []
    for number, rollout in zip(numbers, rollouts, strict=True):
        size, prompt = rollout.num_tokens, len(rollout.prompt_ids)
        drawn = np.zeros(size, np.float32)
        drawn[prompt - 1 : size - 1] = rollout.log_probs
        mask = np.zeros(size, np.bool_)
        mask[prompt - 1 : size - 1] = True
        parts.append((drawn, mask, np.full(size, number), np.arange(1, size + 1)))
    drawn, mask, sequences, positions = (np.concatenate(x) for x in zip(*parts, strict=True))
    return tuple(map(torch.from_numpy, (drawn, mask, sequences, positions)))  # type: ignore[return-value]
