"""A rollout's discrete choices, taken by the layers of one forward instead of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from glm5.errors import ReplayError
from glm5.model.selections import LayerSelections

Stream = Literal["experts", "topk"]


@dataclass(frozen=True)
class Replay:
    """What the decoder layers of a micro-batch are to choose, by layer number (from 0).

    experts: [tokens of the whole row, experts per token] integer on the model's device; a row of
    -1 leaves the choice to the router. topk: of the full layers. None: nothing is replayed.
    """

    experts: Mapping[int, Tensor] | None = None
    topk: Mapping[int, LayerSelections] | None = None

    def entries(self) -> set[tuple[Stream, int]]:
        """All that layers have to take."""
        experts: set[tuple[Stream, int]] = {("experts", layer) for layer in self.experts or ()}
        return experts | {("topk", layer) for layer in self.topk or ()}


class Observer(Protocol):
    """Sees what layers would choose themselves, whether something is replayed or not."""

    def see_experts(self, layer: int, tokens: range, experts: Tensor) -> None:
        """experts [len(tokens), experts per token] int64 of these tokens of the packed row."""

    def see_topk(self, layer: int, queries: range, topk_indices: Tensor) -> None:
        """topk_indices [len(queries), index_topk] int32, in positions of the packed row.

        Ascending, -1 only at the tail; all -1 for a query that attends densely.
        """


@dataclass
class Ledger:
    """What the layers have taken in one forward: each entry exactly once.

    What is recomputed after the forward takes the same entries again.
    """

    taken: set[tuple[Stream, int]] = field(default_factory=set)
    finished: bool = False

    def take(self, stream: Stream, layer: int) -> None:
        """Notes one use.

        Raises:
            ReplayError: it is the second of this forward, or a recomputation without a forward.
        """
        entry = (stream, layer)
        if self.finished != (entry in self.taken):
            raise ReplayError(
                f"layer {layer} takes its {stream} "
                + ("without a forward" if self.finished else "twice in one forward"),
                expected="once in a forward, and again only where it is recomputed",
                remedy="make the packed documents anew for every forward, and call "
                "finish_forward after it",
            )
        self.taken.add(entry)

    def finish(self, entries: Iterable[tuple[Stream, int]]) -> None:
        """Ends the forward; `entries` are those of the layers that ran.

        Raises:
            ReplayError: an entry was left over, or the forward had ended before.
        """
        left = sorted(set(entries) - self.taken)
        if left or self.finished:
            raise ReplayError(
                "a forward left choices of its replay unused"
                if left
                else "a forward was finished twice",
                got=", ".join(f"{stream} of layer {layer}" for stream, layer in left) or None,
                expected="every entry is taken once",
                remedy="record the choices with this model's configuration"
                if left
                else "make the packed documents anew for every forward",
            )
        self.finished = True


@dataclass(frozen=True)
class LayerChoices:
    """One decoder layer's part of what its micro-batch carries."""

    layer: int
    replay: Replay
    ledger: Ledger
    watching: Observer | None

    @property
    def observer(self) -> Observer | None:
        """Who is to see what the layer would choose; what is recomputed was seen before."""
        return None if self.ledger.finished else self.watching

    def take_experts(self) -> Tensor | None:
        """[tokens of the whole row, experts per token], None where the router chooses itself."""
        return self._take("experts", self.replay.experts)

    def take_topk(self) -> LayerSelections | None:
        """The recorded selections, None where the indexer chooses itself."""
        return self._take("topk", self.replay.topk)

    def _take[T](self, stream: Stream, layers: Mapping[int, T] | None) -> T | None:
        self.ledger.take(stream, self.layer)
        if layers is None:
            return None
        if self.layer not in layers:
            raise ReplayError(
                f"there are no {stream} to replay in layer {self.layer}",
                got=f"layers {sorted(layers)}",
                remedy="record the choices with this model's configuration",
            )
        return layers[self.layer]


def layer_choices(
    layer: int, replay: Replay | None, observer: Observer | None, ledger: Ledger
) -> LayerChoices | None:
    """None where the layer chooses for itself and nobody looks."""
    if replay is None and observer is None:
        return None
    return LayerChoices(layer, replay or Replay(), ledger, observer)
