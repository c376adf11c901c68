"""Linear layers of many experts at once, each over the tokens sent to it, with low-rank pairs."""

from glm5.ops.grouped.gated import weighted_swiglu
from glm5.ops.grouped.inputs import MAX_RANK, GroupedPair
from glm5.ops.grouped.linear import grouped_linear

__all__ = ["MAX_RANK", "GroupedPair", "grouped_linear", "weighted_swiglu"]
