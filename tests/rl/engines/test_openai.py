"""The client of OpenAI's completions against a server of vLLM's dialect over the tiny model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI

from glm5.config import Glm5Config
from glm5.errors import EngineError
from glm5.rl.engines.hf import HfEngine
from glm5.rl.engines.http import HttpOptions
from glm5.rl.engines.openai import OpenAiEngine
from glm5.rl.rollout import Rollout
from tests.rl.engines.conftest import MakeAdapter
from tests.rl.engines.openai_server import MODEL, FakeVllm
from tests.rl.engines.prompts import make_requests, make_sampling
from tests.rl.engines.serving import running
from tests.tiny_models import TinyFolder

CPU = torch.device("cpu")
FAST = HttpOptions(read_timeout_s=20.0, max_attempts=3, backoff_s=0.01, num_in_flight=4)
QUICK = "q_a_proj"


@pytest.fixture(scope="module")
def served(folder: Path, glm5: Glm5Config) -> Iterator[tuple[FakeVllm, str]]:
    fake = FakeVllm(HfEngine(folder, glm5, CPU), folder)
    with running(fake.app()) as url:
        yield fake, url


@pytest.fixture
def fake(served: tuple[FakeVllm, str]) -> FakeVllm:
    served[0].reset()
    return served[0]


@pytest.fixture
def engine(fake: FakeVllm, served: tuple[FakeVllm, str], glm5: Glm5Config) -> OpenAiEngine:
    return OpenAiEngine(served[1], MODEL, glm5, options=FAST)


def generate(engine: Any, **options: Any) -> list[Rollout]:
    rollouts: list[Rollout] = engine.generate(
        make_requests(), make_sampling(**options), record="none"
    )
    return rollouts


def assert_same(got: list[Rollout], expected: list[Rollout]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.request == other.request
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.response_ids, other.response_ids)
        assert np.allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert (one.finish, one.choices) == (other.finish, None)


def test_rollouts_are_those_of_the_model(
    engine: OpenAiEngine, fake: FakeVllm, folder: Path, glm5: Glm5Config, make_adapter: MakeAdapter
) -> None:
    local = HfEngine(folder, glm5, CPU)
    expected = generate(local)
    assert_same(generate(engine), expected)
    stops = {"stop_token_ids": (int(expected[1].response_ids[2]),)}
    assert_same(generate(engine, **stops), generate(local, **stops))
    for version, seed in ((1, 11), (2, 12)):
        engine.load_adapter(make_adapter(seed, QUICK), version)
        local.load_adapter(make_adapter(seed, QUICK), version)
        got = generate(engine)
        assert_same(got, generate(local))
        assert {rollout.adapter_version for rollout in got} == {version}
        assert list(fake.adapters.values()) == [str(make_adapter(seed, QUICK))]
    engine.sleep()
    engine.wake()
    engine.close()
    assert fake.adapters == {}


def test_a_restarted_server_gets_its_adapter_again(
    engine: OpenAiEngine, fake: FakeVllm, make_adapter: MakeAdapter
) -> None:
    engine.load_adapter(make_adapter(11, QUICK), 1)
    before = generate(engine)
    fake.restart()
    assert_same(generate(engine), before)
    assert fake.faults.num_requests["load"] == 2


def test_passing_faults_are_tried_again(engine: OpenAiEngine, fake: FakeVllm) -> None:
    expected = generate(engine)
    fake.faults.add("completions", 500, "drop", 429)
    assert_same(generate(engine), expected)
    fake.faults.add("completions", 400)
    with pytest.raises(EngineError, match="refused request prompt-"):
        generate(engine)


def test_a_list_of_models_that_is_none(glm5: Glm5Config) -> None:
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": 5})
    with running(app) as url, pytest.raises(EngineError, match="does not serve the model"):
        OpenAiEngine(url, MODEL, glm5, options=FAST)


def test_what_it_cannot_do_is_said(
    engine: OpenAiEngine, served: tuple[FakeVllm, str], glm5: Glm5Config, tmp_path: Path
) -> None:
    assert not engine.can_record
    with pytest.raises(EngineError, match="cannot record choices"):
        engine.generate(make_requests(), make_sampling(), record="both")
    with pytest.raises(EngineError, match="cannot load other weights"):
        engine.load_model(tmp_path, 1)
    with pytest.raises(EngineError, match="did not take the adapter") as caught:
        engine.load_adapter(tmp_path, 1)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in str(caught.value.remedy)
    with pytest.raises(EngineError, match="does not serve the model") as caught:
        OpenAiEngine(served[1], "other", glm5, options=FAST)
    assert caught.value.got == [MODEL]


@pytest.mark.parametrize(
    ("log_probs", "fits", "refused"),
    [
        ("raw", {"top_p": 0.9}, {"temperature": 0.7}),
        ("processed", {"temperature": 0.7}, {"top_p": 0.9}),
    ],
)
def test_log_probabilities_of_another_distribution_are_refused(
    fake: FakeVllm,
    served: tuple[FakeVllm, str],
    glm5: Glm5Config,
    log_probs: Any,
    fits: dict[str, float],
    refused: dict[str, float],
) -> None:
    engine = OpenAiEngine(served[1], MODEL, glm5, log_probs=log_probs, options=FAST)
    assert generate(engine, **fits)
    with pytest.raises(EngineError, match=f"{log_probs} log-probabilities"):
        generate(engine, **refused)


def of_choice(**changes: Any) -> Any:
    """The right answer with these fields; None takes one away."""

    def edit(content: Any) -> Any:
        choice = content["choices"][0] | changes
        content["choices"] = [{key: v for key, v in choice.items() if v is not None}]
        return content

    return edit


MALFORMED = {
    "no choices": (lambda content: {"choices": []}, "no completion"),
    "no object": (lambda content: [1], "no completion"),
    "no ids": (of_choice(token_ids=None), "does not tell the token ids"),
    "other prompt": (of_choice(prompt_token_ids=[1, 2]), "changed the prompt"),
    "short": (of_choice(logprobs={"token_logprobs": [-1.0]}), "another number"),
    "no log-probs": (of_choice(logprobs=None), "another number"),
    "nan": (of_choice(token_ids=[1], logprobs={"token_logprobs": [float("nan")]}), "that is none"),
    "aborted": (of_choice(finish_reason="abort"), "an end that is none"),
    "other vocabulary": (of_choice(token_ids=[320]), "tokens of another model"),
    "empty": (of_choice(token_ids=[]), "no tokens"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_reply_names_the_request(
    engine: OpenAiEngine, fake: FakeVllm, case: str
) -> None:
    change, message = MALFORMED[case]
    fake.faults.add("completions", change)
    with pytest.raises(EngineError, match="prompt-0") as caught:
        engine.generate(make_requests((5,)), make_sampling(), record="none")
    assert message in caught.value.what


def test_the_folder_that_is_served_tells_how_it_multiplies(
    glm5: Glm5Config, tiny_folder: TinyFolder
) -> None:
    """Of other weights vLLM may still have been told to quantise them."""
    cards: list[dict[str, Any]] = [{"id": "other"}, {"id": MODEL}]
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": cards})
    fp8, plain = str(tiny_folder("5", fp8=True)), str(tiny_folder("5"))
    with running(app) as url:
        for root, products in ((None, "untold"), (plain, "untold"), (fp8, "fp8")):
            cards[1]["root"] = root
            assert OpenAiEngine(url, MODEL, glm5, options=FAST).products == products
