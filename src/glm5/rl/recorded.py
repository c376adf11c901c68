"""Which discrete choices of a rollout are recorded and replayed; light enough for run files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from glm5.model.replay import Stream

Recorded = Literal["none", "routing", "indexer", "both"]
"""Experts of the routers, keys of the indexers."""

STREAMS: Mapping[Recorded, tuple[Stream, ...]] = {
    "none": (),
    "routing": ("experts",),
    "indexer": ("topk",),
    "both": ("experts", "topk"),
}
"""What is recorded; fields of `Choices`."""
