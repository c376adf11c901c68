"""What a step samples: groups of completions with their rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm5.errors import EngineError, ReplayError
from glm5.lora.seeds import seed_of
from glm5.rl.advantages import teaches
from glm5.rl.choices import Choices
from glm5.rl.prompts import Prompt
from glm5.rl.recorded import STREAMS, Recorded
from glm5.rl.rewards import Reward
from glm5.rl.rollout import Engine, Request, Rollout, Sampling
from glm5.rl.sections import RlSection
from glm5.train.packing import BatchOrder

Decode = Callable[[Sequence[int]], str]
"""(token ids) -> the text that rewards and sample tables see."""

# Servers take seeds of 31 bits.
_MAX_SEED = 2**31


@dataclass(frozen=True)
class Group:
    """The completions of one prompt.

    texts: the responses as the reward saw them. rewards [n] float64.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    texts: tuple[str, ...]
    rewards: NDArray[np.float64]

    @property
    def teaches(self) -> bool:
        """Whether some completion is better than another."""
        return teaches(self.rewards)

    def without_choices(self) -> Group:
        """What every rank can hold."""
        light = tuple(replace(rollout, choices=None) for rollout in self.rollouts)
        return replace(self, rollouts=light)

    @property
    def choices(self) -> list[Choices | None]:
        """Of each completion."""
        return [rollout.choices for rollout in self.rollouts]


@dataclass(frozen=True)
class Collected:
    """All that a step sampled, in order, the groups that teach nothing among them."""

    groups: tuple[Group, ...]
    rollout_seconds: float
    reward_seconds: float
    reward_failures: int
    """Comparisons that were given up."""

    def without_choices(self) -> Collected:
        """What every rank can hold."""
        return replace(self, groups=tuple(group.without_choices() for group in self.groups))


class Collector:
    """Samples from the engine and scores; what is asked is a function of (seed, step) alone."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        reward: Reward,
        decode: Decode,
        section: RlSection,
        sampling: Sampling,
        *,
        shuffle: bool,
        sleep: bool,
    ) -> None:
        """sampling: its seed is that of the run. sleep: whether the engine rests between steps."""
        self.engine = engine
        self._prompts = prompts
        self._reward = reward
        self._decode = decode
        self._section = section
        self._sampling = sampling
        self._shuffle = shuffle
        self._sleep = sleep
        self._is_asleep = False

    def wake(self) -> None:
        """The engine takes weights and samples again.

        Raises:
            EngineError: it does not.
        """
        if self._is_asleep:
            self.engine.wake()
        self._is_asleep = False

    def close(self) -> None:
        """Gives the engine and the reward back; a server that others started is left awake."""
        with suppress(EngineError):
            self.wake()
        self.engine.close()
        self._reward.close()

    def collect(self, step: int, version: int) -> Collected:
        """The groups of `step` (from 1), by an engine that has the weights `version`.

        Raises:
            EngineError: the engine fails, samples with other weights, or records something else
            than choices. RewardError: a completion cannot be scored.
        """
        groups: list[Group] = []
        rollout_seconds = reward_seconds = 0.0
        failures = self._reward.num_failures
        for attempt in range(self._section.num_resamples + 1):
            taught = sum(group.teaches for group in groups)
            missing = self._section.prompts_per_step - taught
            if not missing:
                break
            started = time.perf_counter()
            drawn = self._draw(step, attempt, missing, version)
            sampled = time.perf_counter()
            groups += [self._score(prompt, rollouts) for prompt, rollouts in drawn]
            rollout_seconds += sampled - started
            reward_seconds += time.perf_counter() - sampled
        if self._sleep:
            self.engine.sleep()
            self._is_asleep = True
        failures = self._reward.num_failures - failures
        return Collected(tuple(groups), rollout_seconds, reward_seconds, failures)

    def _draw(
        self, step: int, attempt: int, count: int, version: int
    ) -> list[tuple[Prompt, tuple[Rollout, ...]]]:
        rows = self._order(attempt).rows(step - 1)[:count]
        requests = [
            self._request(step, attempt, place, row, sample)
            for place, row in enumerate(rows)
            for sample in range(self._section.group_size)
        ]
        record: Recorded = self._section.replay
        try:
            rollouts = self.engine.generate(requests, self._sampling, record=record)
        except ReplayError as error:
            # the engine's fault as any other, before the step has changed anything
            raise EngineError(
                error.what, got=error.got, expected=error.expected, remedy=error.remedy
            ) from error
        _check_rollouts(requests, rollouts, version)
        _check_records(rollouts, record)
        size = self._section.group_size
        return [
            (self._prompts[row], tuple(rollouts[place * size : (place + 1) * size]))
            for place, row in enumerate(rows)
        ]

    def _order(self, attempt: int) -> BatchOrder:
        """Other prompts come in an order of their own, so that each attempt has new ones."""
        seed = self._sampling.seed
        return BatchOrder(
            len(self._prompts),
            self._section.prompts_per_step,
            seed if attempt == 0 else seed_of("resample", seed, attempt) % _MAX_SEED,
            self._shuffle or attempt > 0,
        )

    def _request(self, step: int, attempt: int, place: int, row: int, sample: int) -> Request:
        prompt = self._prompts[row]
        again = f" resample {attempt}" if attempt else ""
        return Request(
            name=f"step {step}{again} prompt {place} ({prompt.source}) sample {sample}",
            prompt_ids=prompt.ids,
            seed=seed_of(self._sampling.seed, step, attempt, place, sample) % _MAX_SEED,
        )

    def _score(self, prompt: Prompt, rollouts: tuple[Rollout, ...]) -> Group:
        texts = tuple(self._decode(rollout.response_ids.tolist()) for rollout in rollouts)
        rewards = [
            self._reward(rollout.request, text, prompt.label, prompt.row)
            for rollout, text in zip(rollouts, texts, strict=True)
        ]
        return Group(prompt, rollouts, texts, np.array(rewards, np.float64))


def _check_records(rollouts: Sequence[Rollout], record: Recorded) -> None:
    """What is replayed was recorded, of every token.

    Raises:
        EngineError: it was not.
    """
    for rollout in rollouts:
        for name in STREAMS[record]:
            found = getattr(rollout.choices, name, None)
            if found is None or found.num_tokens != rollout.num_tokens:
                raise EngineError(
                    f"{rollout.request} has no record of its {name}",
                    got=None if found is None else f"one of {found.num_tokens} tokens",
                    expected=f"one of its {rollout.num_tokens} tokens",
                    remedy="let the engine record what is replayed, for every rollout",
                )


def _check_rollouts(requests: Sequence[Request], rollouts: Sequence[Rollout], version: int) -> None:
    """An engine answers what it was asked, in order, with the weights that it was given.

    Raises:
        EngineError: it does not.
    """
    if [request.name for request in requests] != [rollout.request for rollout in rollouts]:
        raise EngineError(
            "the engine answered other requests than it was asked",
            got=f"{len(rollouts)} rollouts",
            expected=f"one for each of {len(requests)} requests, in their order",
        )
    for request, rollout in zip(requests, rollouts, strict=True):
        if rollout.adapter_version != version:
            raise EngineError(
                f"{request.name} was sampled with stale weights",
                got=f"version {rollout.adapter_version}",
                expected=f"version {version}, which the engine was given last",
                remedy="see whether another program loads adapters into the same server",
            )
        if not np.array_equal(request.prompt_ids, rollout.prompt_ids):
            raise EngineError(f"{request.name} was answered for another prompt")
