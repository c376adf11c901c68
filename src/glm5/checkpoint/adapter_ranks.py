"""Ranks and alphas of many weights in the few settings that PEFT reads them from."""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from glm5.checkpoint.adapter_layout import fused_width, short_name

Ranks = Mapping[str, tuple[int, float]]


def rank_settings(ranks: Ranks) -> dict[str, Any]:
    """r, lora_alpha, use_rslora, rank_pattern and alpha_pattern for (rank, scale) by weight name.

    Of a fused weight `ranks` has the rank of one projection; it gets that of all together, and the
    alpha that keeps the scale. The commonest pair gives r and lora_alpha. A kind of weight that
    differs from them as a whole is one pattern, else each of its weights is one; patterns are
    regular expressions for endings of names. use_rslora is set where it makes every alpha a whole
    number and its absence does not: alpha = scale * sqrt(rank) instead of scale * rank.
    """
    rslora = _are_whole(ranks, _rslora_alpha) and not _are_whole(ranks, _plain_alpha)
    of = _rslora_alpha if rslora else _plain_alpha
    rank, scale = Counter(ranks.values()).most_common(1)[0][0]
    alpha = of(rank, scale)
    own_ranks = {weight: fused_width(weight) * own for weight, (own, _) in ranks.items()}
    alphas = {weight: of(own_ranks[weight], own) for weight, (_, own) in ranks.items()}
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "rank_pattern": _patterns(own_ranks, rank),
        "alpha_pattern": _patterns(alphas, alpha),
    }


def _are_whole(ranks: Ranks, of: Callable[[int, float], float]) -> bool:
    return all(isinstance(of(rank, scale), int) for rank, scale in ranks.values())


def _plain_alpha(rank: int, scale: float) -> float:
    return alpha_for(scale, rank)


def _rslora_alpha(rank: int, scale: float) -> float:
    return alpha_for(scale, math.sqrt(rank))


def alpha_for(scale: float, divisor: float) -> float:
    """The alpha of which alpha / divisor is `scale`: the shortest number that gives it exactly."""
    alpha = scale * divisor
    short = float(f"{alpha:.12g}")
    if short / divisor == scale:
        alpha = short
    return int(alpha) if alpha.is_integer() else alpha


def _patterns[T: Hashable](values: Mapping[str, T], default: T) -> dict[str, T]:
    kinds: dict[str, set[T]] = {}
    for weight, value in values.items():
        kinds.setdefault(short_name(weight), set()).add(value)
    patterns: dict[str, T] = {}
    for weight, value in values.items():
        if len(kinds[short_name(weight)]) > 1:
            patterns[re.escape(weight)] = value
        elif value != default:
            patterns[re.escape(short_name(weight))] = value
    return patterns
