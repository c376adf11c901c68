"""What a step asks the engine for, and what it refuses as an answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from glm5.errors import EngineError, ReplayError
from glm5.rl.collect import Collected, Collector
from glm5.rl.metrics import collected_metrics
from glm5.rl.prompts import Prompt
from glm5.rl.rewards import Reward
from glm5.rl.rollout import Rollout, Sampling
from glm5.rl.sections import RlSection
from tests.rl.running import FakeEngine

PROMPTS = [
    Prompt(np.arange(n + 1, dtype=np.int32), f"{n}", {"id": n}, f"p.jsonl:{n + 1}")
    for n in range(7)
]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=5, stop_token_ids=(1,), seed=3)


def by_length(text: str, label: Any, row: Any) -> float:
    return float(len(text.split()))


def collector(
    engine: FakeEngine,
    score: Callable[..., object] = by_length,
    *,
    seed: int = 3,
    sleep: bool = False,
    **settings: Any,
) -> Collector:
    section = RlSection(
        **{
            "prompts_per_step": 3,
            "group_size": 4,
            "max_tokens_per_micro_batch": 64,
            "equal_groups": "skip",
        }
        | settings
    )
    engine.version = 5
    return Collector(
        engine,
        PROMPTS,
        Reward(score, needs_label=False),
        lambda ids: " ".join(map(str, ids)),
        section,
        replace(SAMPLING, seed=seed),
        shuffle=True,
        sleep=sleep,
    )


def asked(engine: FakeEngine) -> list[tuple[str, int, bytes]]:
    return [(r.name, r.seed, r.prompt_ids.tobytes()) for call in engine.calls for r in call]


def test_groups_of_one_prompt_each() -> None:
    engine = FakeEngine()
    found = collector(engine).collect(2, version=5)
    assert len(found.groups) == 3
    for group in found.groups:
        assert len(group.rollouts) == len(group.rewards) == 4
        assert all((r.prompt_ids == group.prompt.ids).all() for r in group.rollouts)
        assert group.rewards.tolist() == [len(r.response_ids) for r in group.rollouts]
    assert len({request.seed for request in engine.calls[0]}) == 12
    assert len({request.name for request in engine.calls[0]}) == 12
    assert all(0 <= request.seed < 2**31 for request in engine.calls[0])
    assert found.groups[0].prompt.source in engine.calls[0][0].name


def test_requests_follow_from_seed_and_step_alone() -> None:
    first, again, other = FakeEngine(), FakeEngine(), FakeEngine()
    whole = collector(first)
    for step in (1, 2, 3):
        whole.collect(step, version=5)
    # a resumed run starts at a later step
    collector(again).collect(3, version=5)
    assert asked(again) == asked(first)[-12:]
    collector(other, seed=4).collect(3, version=5)
    assert not set(asked(other)) & set(asked(first))
    assert asked(first)[:12] != asked(first)[12:24]


def test_all_prompts_have_their_turn() -> None:
    engine = FakeEngine()
    whole = collector(engine)
    found = [whole.collect(step, version=5) for step in range(1, 8)]
    sources = [group.prompt.source for step in found for group in step.groups]
    assert sorted(sources) == sorted(3 * [prompt.source for prompt in PROMPTS])


def test_equal_groups_are_sampled_again_with_others_within_the_bound() -> None:
    engine = FakeEngine()

    def score(text: str, label: Any, row: Any) -> float:
        # only prompts with an odd id teach
        return by_length(text, label, row) if row["id"] % 2 else 1.0

    found = collector(engine, score, equal_groups="resample", max_resamples=6).collect(1, 5)
    taught = [group for group in found.groups if group.teaches]
    assert 1 < len(engine.calls) <= 7
    assert len(taught) == 3
    # no more is asked for than is missing
    assert len(engine.calls[0]) // 4 == 3 and len(engine.calls[-1]) // 4 < 3
    assert len(found.groups) == sum(len(call) for call in engine.calls) // 4
    assert len(set(asked(engine))) == len(asked(engine))


def test_resampling_ends() -> None:
    engine = FakeEngine()
    found = collector(engine, lambda *args: 1.0, equal_groups="resample", max_resamples=2)
    collected = found.collect(1, version=5)
    assert len(engine.calls) == 3 and len(collected.groups) == 9
    assert not any(group.teaches for group in collected.groups)


def test_skipping_asks_once() -> None:
    engine = FakeEngine()
    collected = collector(engine, lambda *args: 1.0).collect(1, version=5)
    assert len(engine.calls) == 1 and len(collected.groups) == 3


def of_version(version: int) -> Callable[[list[Rollout]], list[Rollout]]:
    return lambda found: [*found[:-1], replace(found[-1], adapter_version=version)]


def of_other_prompt(found: list[Rollout]) -> list[Rollout]:
    return [replace(found[0], prompt_ids=found[0].prompt_ids + 1), *found[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_version(4), "(?s)sample 3 was sampled with stale weights.*version 4.*version 5"),
        (of_version(6), "stale"),
        (lambda found: found[::-1], "other requests than it was asked"),
        (lambda found: found[:-1], "other requests than it was asked"),
        (of_other_prompt, "another prompt"),
    ],
)
def test_answers_to_other_questions(change: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        collector(FakeEngine(change=change)).collect(1, version=5)


@pytest.mark.parametrize("replay", ["routing", "indexer", "both"])
def test_a_record_that_is_missing(replay: str) -> None:
    with pytest.raises(EngineError, match=r"sample 0 has no record of its (experts|topk)"):
        collector(FakeEngine(), replay=replay).collect(1, version=5)


def test_a_record_that_is_none_is_the_engine_s_fault() -> None:
    def refuse(found: list[Rollout]) -> list[Rollout]:
        raise ReplayError("a record of other tokens", got=3, expected=4, remedy="ask again")

    with pytest.raises(EngineError, match=r"(?s)a record of other tokens.*3.*4.*ask again"):
        collector(FakeEngine(change=refuse)).collect(1, version=5)


def test_comparisons_that_were_given_up_are_counted() -> None:
    class Verifier:
        num_failures = 7

    verifier = Verifier()

    def score(*args: Any) -> float:
        verifier.num_failures += 1
        return 0.0

    whole = collector(FakeEngine(), score)
    whole._reward = Reward(score, needs_label=False, verifier=verifier)  # type: ignore[arg-type]
    assert collected_metrics(whole.collect(1, version=5))["reward_failures"] == 12
    assert whole.collect(2, version=5).reward_failures == 12


def test_the_engine_rests_where_it_is_told_to() -> None:
    engine = FakeEngine()
    whole = collector(engine, sleep=True)
    whole.wake()
    assert engine.events == []
    whole.collect(1, version=5)
    whole.wake()
    whole.collect(2, version=5)
    assert engine.events == ["generate", "sleep", "wake", "generate", "sleep"]
    # a server is not left asleep
    whole.close()
    assert engine.events[-2:] == ["wake", "close"]
    restless = FakeEngine()
    collector(restless).collect(1, version=5)
    assert restless.events == ["generate"]


def test_what_ranks_share_is_light() -> None:
    engine = FakeEngine(change=lambda found: [replace(r, choices="heavy") for r in found])
    found: Collected = collector(engine).collect(1, version=5)
    assert found.groups[0].choices == ["heavy"] * 4
    assert found.without_choices().groups[0].choices == [None] * 4
    assert found.without_choices().groups[0].rewards is found.groups[0].rewards
