"""Parameters of sampling that SGLang and vLLM name alike."""

from __future__ import annotations

from typing import Any

from glm5.rl.rollout import Sampling


def shape_params(sampling: Sampling) -> dict[str, Any]:
    """All that shapes the distribution; it is said in full, because servers have defaults."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
