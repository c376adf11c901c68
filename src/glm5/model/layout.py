"""Whether a model can be split as a layout says, known before anything is built."""

from __future__ import annotations

from glm5.config import Glm5Config
from glm5.errors import LayoutError
from glm5.runtime.distributed import Layout


def check_layout(glm5: Glm5Config, layout: Layout) -> None:
    """Checks all but the pipeline's stages.

    Raises:
        LayoutError: a size does not divide what it splits.
    """
    for name, size, ranks in _splits(glm5, layout):
        if size % ranks:
            raise LayoutError(
                f"{name} does not divide over the ranks",
                got=f"{size} over {ranks}",
                expected="a multiple of the number of ranks",
                remedy="choose another tp, ep or etp",
            )


def _splits(glm5: Glm5Config, layout: Layout) -> list[tuple[str, int, int]]:
    """(what, its size, over how many ranks it is split)."""
    shared_width = glm5.moe_intermediate_size * glm5.n_shared_experts
    return [
        ("num_attention_heads", glm5.num_attention_heads, layout.tp),
        ("vocab_size", glm5.vocab_size, layout.tp),
        ("intermediate_size", glm5.intermediate_size, layout.tp),
        ("moe_intermediate_size x n_shared_experts", shared_width, layout.tp),
        ("n_routed_experts", glm5.n_routed_experts, layout.ep),
        ("moe_intermediate_size", glm5.moe_intermediate_size, layout.etp),
    ]
