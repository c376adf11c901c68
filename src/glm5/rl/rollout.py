"""What a rollout engine is asked for and what it answers; engines are told apart nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from glm5.rl.choices import Choices
from glm5.rl.products import Products
from glm5.rl.recorded import Recorded

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How every token is drawn.

    temperature: > 0, divides the logits. top_p in (0, 1], 1 draws from all tokens; below 1 an
        engine draws from fewer tokens than the trainer's softmax counts, which is a gap.
    max_new_tokens: >= 1. stop_token_ids end a completion, and are part of it.
    seed: of the first completion's stream.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Request:
    """One completion that is asked for; `name` appears in errors and sample tables."""

    name: str
    prompt_ids: NDArray[np.int32]
    seed: int


@dataclass(frozen=True)
class Rollout:
    """One completion, as the engine computed it.

    prompt_ids [p] int32; response_ids [r] int32, r >= 1, with the stop token if one ended it;
    log_probs [r] float32: natural logarithms of softmax(logits / temperature) at the tokens drawn;
    choices: the discrete decisions of the p + r - 1 tokens that were queries, None where the engine
    does not tell. adapter_version: of the weights that drew it, counted from 0.
    """

    request: str
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish: Finish
    choices: Choices | None
    adapter_version: int

    @property
    def num_tokens(self) -> int:
        """Of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


class Engine(Protocol):
    """A program that samples from the model that is trained."""

    @property
    def can_record(self) -> bool:
        """Whether rollouts can carry choices that a replay needs, of one kind at least."""

    @property
    def products(self) -> Products:
        """How it multiplies linears, as far as it tells."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, record: Recorded
    ) -> list[Rollout]:
        """One rollout for each request, in their order; the choices that `record` names.

        Raises:
            EngineError: the engine does not answer, or answers something else.
            ReplayError: a record cannot be that of its request.
        """

    def load_adapter(self, folder: Path, version: int) -> None:
        """Samples from the base and this PEFT adapter from now on; the one before it is dropped.

        Raises:
            EngineError: the engine did not take it.
        """

    def load_model(self, folder: Path, version: int) -> None:
        """Samples from the weights of this Hugging Face folder from now on: full training.

        Raises:
            EngineError: the engine did not take it.
        """

    def sleep(self) -> None:
        """Frees what memory it can while the trainer works."""

    def wake(self) -> None:
        """Is ready to generate again."""

    def close(self) -> None:
        """Gives everything back; an engine that others started goes on running."""
