"""Turns the choices that an engine recorded into what a replay reads."""

from __future__ import annotations

from glm5.config import Glm5Config
from glm5.rl.choices import Choices, ChoiceShape, pack_experts, pack_topk
from glm5.rl.engines.hf_record import Record


def pack_choices(
    request: str, experts: Record | None, keys: Record | None, glm5: Glm5Config
) -> Choices | None:
    """None where nothing was recorded.

    experts [tokens - 1, all or sparse layers, num_experts_per_tok], keys [tokens - 1, all or "full"
    layers, index_topk]: int32, keys counted from the request's first token, -1 for none.

    Raises:
        ReplayError: they cannot be the choices of that request.
    """
    if experts is None and keys is None:
        return None
    shape = ChoiceShape.from_config(glm5)
    return Choices(
        experts=None if experts is None else pack_experts(experts, shape, request=request),
        topk=None if keys is None else pack_topk(keys, shape, request=request),
    )
