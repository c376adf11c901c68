"""Requests for tests."""

from collections.abc import Sequence

import numpy as np

from glm5.rl.rollout import Request, Sampling
from tests.tiny_models import draw_tokens

# around and above the tiny model's index_topk of 8
LENGTHS = (3, 21, 8, 12)


def make_requests(lengths: Sequence[int] = LENGTHS) -> list[Request]:
    return [
        Request(
            name=f"prompt-{index}",
            prompt_ids=draw_tokens(length, seed=index).numpy().astype(np.int32),
            seed=100 + index,
        )
        for index, length in enumerate(lengths)
    ]


def make_sampling(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = 6,
    stop_token_ids: tuple[int, ...] = (),
) -> Sampling:
    return Sampling(temperature, top_p, max_new_tokens, stop_token_ids, seed=0)
