"""The SGLang client against a server of the same protocol over the tiny model, and its faults."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.config import Glm5Config
from glm5.errors import EngineError, ReplayError
from glm5.rl.engines.hf import HfEngine
from glm5.rl.engines.http import HttpOptions
from glm5.rl.engines.sglang import SglangEngine
from glm5.rl.rollout import Rollout
from tests.rl.engines.conftest import MakeAdapter
from tests.rl.engines.prompts import make_requests, make_sampling
from tests.rl.engines.serving import running
from tests.rl.engines.sglang_server import ALL_FLAGS, FakeSglang, encode
from tests.tiny_models import TinyFolder

CPU = torch.device("cpu")
FAST = HttpOptions(
    connect_timeout_s=2.0, read_timeout_s=20.0, max_attempts=3, backoff_s=0.01, num_in_flight=4
)

# fewer linears than "all", and sooner in and out
QUICK = "q_a_proj"

Meta = dict[str, Any]


@pytest.fixture(scope="module")
def local(folder: Path, glm5: Glm5Config) -> HfEngine:
    """What the server should have computed."""
    return HfEngine(folder, glm5, CPU)


@pytest.fixture(scope="module")
def served(folder: Path, glm5: Glm5Config) -> Iterator[tuple[FakeSglang, str]]:
    fake = FakeSglang(HfEngine(folder, glm5, CPU), folder, glm5)
    with running(fake.app()) as url:
        yield fake, url


@pytest.fixture
def fake(served: tuple[FakeSglang, str]) -> FakeSglang:
    served[0].reset()
    return served[0]


@pytest.fixture
def engine(fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config) -> SglangEngine:
    return SglangEngine(served[1], glm5, record="both", lora=True, options=FAST)


def assert_same(got: list[Rollout], expected: list[Rollout]) -> None:
    assert [rollout.request for rollout in got] == [rollout.request for rollout in expected]
    for one, other in zip(got, expected, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.response_ids, other.response_ids)
        assert np.allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert one.finish == other.finish


def generate(engine: SglangEngine, **options: Any) -> list[Rollout]:
    return engine.generate(make_requests(), make_sampling(**options), record="none")


def test_rollouts_are_those_of_the_model(
    engine: SglangEngine, fake: FakeSglang, local: HfEngine
) -> None:
    for options in ({}, {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 3}):
        sampling = make_sampling(**options)
        got = engine.generate(make_requests(), sampling, record="none")
        assert_same(got, local.generate(make_requests(), sampling, record="none"))
        assert all(rollout.choices is None for rollout in got)
    assert {rollout.adapter_version for rollout in got} == {0}
    assert not any(body["return_routed_experts"] for _, body in fake.bodies)


def test_stop_tokens_end_and_belong_to_a_completion(engine: SglangEngine, local: HfEngine) -> None:
    free = local.generate(make_requests(), make_sampling(), record="none")
    sampling = make_sampling(stop_token_ids=(int(free[1].response_ids[2]),))
    expected = local.generate(make_requests(), sampling, record="none")
    assert "stop" in {rollout.finish for rollout in expected}
    assert_same(engine.generate(make_requests(), sampling, record="none"), expected)


@pytest.mark.parametrize("dtype", [None, "int32", "uint16", "uint8"])
def test_records_arrive_as_the_model_made_them(
    engine: SglangEngine,
    fake: FakeSglang,
    local: HfEngine,
    glm5: Glm5Config,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str | None,
) -> None:
    fake.experts_dtype, fake.names_layers = dtype, dtype is not None
    seen: dict[str, Any] = {}

    def pack(request: str, experts: Any, keys: Any, glm5: Glm5Config) -> None:
        seen[request] = (experts, keys)

    monkeypatch.setattr("glm5.rl.engines.sglang.pack_choices", pack)
    requests, sampling = make_requests(), make_sampling()
    engine.generate(requests, sampling, record="both")
    sparse = [kind == "sparse" for kind in glm5.mlp_layer_types]
    full = [kind == "full" for kind in glm5.indexer_types]
    for completion in local.complete(requests, sampling, record="both"):
        experts, keys = seen[completion.request.name]
        assert experts.dtype == keys.dtype == np.int32
        assert experts.shape[1] == keys.shape[1] == glm5.num_hidden_layers
        assert np.array_equal(experts[:, sparse], np.concatenate(completion.experts))
        assert np.array_equal(keys[:, full], np.concatenate(completion.keys))


def test_records_of_all_layers_are_packed(engine: SglangEngine) -> None:
    for rollout in engine.generate(make_requests(), make_sampling(), record="both"):
        assert rollout.choices is not None
        assert rollout.choices.experts is not None and rollout.choices.topk is not None


@pytest.mark.parametrize(("recorded", "has"), [("routing", (1, 0)), ("indexer", (0, 1))])
def test_only_what_is_asked_for_is_recorded(
    engine: SglangEngine,
    fake: FakeSglang,
    monkeypatch: pytest.MonkeyPatch,
    recorded: Any,
    has: tuple[int, int],
) -> None:
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        "glm5.rl.engines.sglang.pack_choices",
        lambda request, experts, keys, glm5: seen.append((experts is not None, keys is not None)),
    )
    engine.generate(make_requests(), make_sampling(), record=recorded)
    assert set(seen) == {has}


def test_adapters_replace_each_other(
    engine: SglangEngine,
    fake: FakeSglang,
    folder: Path,
    glm5: Glm5Config,
    make_adapter: MakeAdapter,
) -> None:
    local = HfEngine(folder, glm5, CPU)
    for version, seed in ((1, 11), (2, 12)):
        engine.load_adapter(make_adapter(seed, QUICK), version)
        local.load_adapter(make_adapter(seed, QUICK), version)
        got = generate(engine)
        assert_same(got, local.generate(make_requests(), make_sampling(), record="none"))
        assert {rollout.adapter_version for rollout in got} == {version}
        assert list(fake.adapters.values()) == [str(make_adapter(seed, QUICK))]
    engine.close()
    assert fake.adapters == {}


def test_two_clients_never_share_the_name_of_an_adapter(
    served: tuple[FakeSglang, str], fake: FakeSglang, glm5: Glm5Config, make_adapter: MakeAdapter
) -> None:
    for seed in (11, 12):
        engine = SglangEngine(served[1], glm5, record="none", lora=True, options=FAST)
        engine.load_adapter(make_adapter(seed, QUICK), 1)
    assert sorted(fake.adapters.values()) == sorted(
        str(make_adapter(seed, QUICK)) for seed in (11, 12)
    )


def test_an_adapter_that_is_not_taken_is_never_sampled_without(
    engine: SglangEngine, fake: FakeSglang, tmp_path: Path
) -> None:
    for attempt in (lambda: engine.load_adapter(tmp_path, 1), lambda: generate(engine)):
        with pytest.raises(EngineError, match="did not take the adapter") as caught:
            attempt()
        assert "no adapter at" in str(caught.value.got)
        assert "--enable-lora" in str(caught.value.remedy)


def test_a_load_whose_answer_was_lost_is_not_made_twice(
    engine: SglangEngine, fake: FakeSglang, make_adapter: MakeAdapter
) -> None:
    def lose(content: Any) -> Any:
        raise ConnectionAbortedError

    fake.faults.add("/load_lora_adapter", lose)
    engine.load_adapter(make_adapter(11, QUICK), 1)
    assert fake.faults.num_requests["/load_lora_adapter"] == 2
    assert len(fake.adapters) == 1
    generate(engine)


def test_a_restarted_server_gets_its_adapter_again(
    engine: SglangEngine, fake: FakeSglang, make_adapter: MakeAdapter
) -> None:
    engine.load_adapter(make_adapter(11, QUICK), 1)
    before = generate(engine)
    fake.restart()
    assert_same(generate(engine), before)
    # once for all requests that found it missing
    assert fake.faults.num_requests["/load_lora_adapter"] == 2
    fake.restart()
    assert_same(generate(engine), before)
    assert fake.faults.num_requests["/load_lora_adapter"] == 3


def test_a_restarted_server_gets_its_weights_again(
    engine: SglangEngine, fake: FakeSglang, tiny_folder: TinyFolder, glm5: Glm5Config
) -> None:
    other = tiny_folder("5.2", seed=7)
    engine.load_model(other, 3)
    before = generate(engine)
    expected = HfEngine(other, glm5, CPU).generate(make_requests(), make_sampling(), record="none")
    assert_same(before, expected)
    assert {rollout.adapter_version for rollout in before} == {3}
    fake.restart()
    assert_same(generate(engine), before)
    assert fake.faults.num_requests["/update_weights_from_disk"] == 2


def test_weights_that_are_not_taken(engine: SglangEngine, tmp_path: Path) -> None:
    for attempt in (lambda: engine.load_model(tmp_path, 1), lambda: generate(engine)):
        with pytest.raises(EngineError, match="did not take the weights"):
            attempt()


def test_a_server_that_does_not_tell_its_weights_is_an_error(
    engine: SglangEngine, fake: FakeSglang, folder: Path
) -> None:
    engine.load_model(folder, 1)
    fake.faults.add("/generate", *[meta_without("weight_version")] * 8)
    with pytest.raises(EngineError, match="refused request prompt-") as caught:
        generate(engine)
    assert "weights that were loaded last" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("enable_lora", "--enable-lora"),
        ("enable_return_routed_experts", "--enable-return-routed-experts"),
        ("enable_return_indexer_topk", "--enable-return-indexer-topk"),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_missing_flag_is_named_at_start(
    fake: FakeSglang,
    served: tuple[FakeSglang, str],
    glm5: Glm5Config,
    flag: str,
    named: str,
    is_known: bool,
) -> None:
    fake.flags = {key: value for key, value in ALL_FLAGS.items() if key != flag}
    if is_known:
        fake.flags[flag] = False
    with pytest.raises(EngineError, match="without a flag") as caught:
        SglangEngine(served[1], glm5, record="both", lora=True, options=FAST)
    assert named in str(caught.value.expected)


def test_a_server_without_flags_serves_what_needs_none(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config, make_adapter: MakeAdapter
) -> None:
    fake.flags = {"server_args": {"enable_lora": False}}
    engine = SglangEngine(served[1], glm5, record="none", lora=False, options=FAST)
    assert not engine.can_record
    assert len(generate(engine)) == len(make_requests())
    # no determinism, no seed
    assert "sampling_seed" not in fake.bodies[0][1]["sampling_params"]
    with pytest.raises(EngineError, match="without a flag"):
        engine.generate(make_requests(), make_sampling(), record="routing")
    with pytest.raises(EngineError, match="without a flag"):
        engine.load_adapter(make_adapter(11, QUICK), 1)
    engine.sleep()
    assert not [path for path, _ in fake.bodies if "memory" in path]


def test_it_sleeps_with_the_weights_that_the_server_keeps(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    for backup, tags in ((False, ["kv_cache"]), (True, ["kv_cache", "weights"])):
        fake.flags["enable_weights_cpu_backup"] = backup
        engine = SglangEngine(served[1], glm5, record="both", lora=True, options=FAST)
        engine.sleep()
        engine.wake()
        for (path, body), verb in zip(fake.bodies[-2:], ("release", "resume"), strict=True):
            assert path == f"/{verb}_memory_occupation" and body == {"tags": tags}
    fake.faults.add("/release_memory_occupation", 400)
    with pytest.raises(EngineError, match="did not release"):
        engine.sleep()


def test_an_older_name_of_the_server_info_and_no_sglang_at_all(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    fake.faults.add("/server_info", 404)
    with pytest.raises(EngineError, match="does not tell how it was started"):
        SglangEngine(served[1], glm5, record="none", lora=False, options=FAST)
    app = fake.app()
    app.get("/get_server_info")(lambda: fake.flags)
    fake.faults.add("/server_info", 404)
    with running(app) as url:
        engine = SglangEngine(url, glm5, record="both", lora=True, options=FAST)
        assert engine.can_record


def test_arguments_that_are_none(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    fake.faults.add("/server_info", lambda right: {"server_args": 7})
    with pytest.raises(EngineError, match="without a flag"):
        SglangEngine(served[1], glm5, record="both", lora=True, options=FAST)


@pytest.mark.parametrize("fault", [500, 503, 429, "drop"])
def test_a_passing_fault_is_tried_again(
    engine: SglangEngine, fake: FakeSglang, local: HfEngine, fault: Any
) -> None:
    fake.faults.add("/generate", fault, fault)
    assert_same(generate(engine), local.generate(make_requests(), make_sampling(), record="none"))
    assert fake.faults.num_requests["/generate"] == len(make_requests()) + 2


@pytest.mark.parametrize("fault", [400, 422])
def test_a_refusal_is_not_tried_again(engine: SglangEngine, fake: FakeSglang, fault: int) -> None:
    fake.faults.add("/generate", fault)
    with pytest.raises(EngineError, match="refused request prompt-") as caught:
        engine.generate(make_requests((5,)), make_sampling(), record="none")
    assert f"HTTP {fault}" in str(caught.value.got) and "injected" in str(caught.value.got)
    assert fake.faults.num_requests["/generate"] == 1


@pytest.mark.parametrize("fault", [500, "drop"])
def test_a_lasting_fault_tells_url_attempts_and_remedy(
    engine: SglangEngine, fake: FakeSglang, served: tuple[FakeSglang, str], fault: Any
) -> None:
    fake.faults.add("/generate", *[fault] * 3)
    with pytest.raises(EngineError, match="does not answer") as caught:
        engine.generate(make_requests((5,)), make_sampling(), record="none")
    assert served[1] in caught.value.what
    assert "after 3 attempts at /generate" in str(caught.value.got)
    assert "start it again" in str(caught.value.remedy)


def test_a_dead_server_and_one_that_came_back(
    fake: FakeSglang, glm5: Glm5Config, make_adapter: MakeAdapter
) -> None:
    with running(fake.app()) as url:
        engine = SglangEngine(url, glm5, record="both", lora=True, options=FAST)
        engine.load_adapter(make_adapter(11, QUICK), 1)
        before = generate(engine)
    with pytest.raises(EngineError, match="does not answer") as caught:
        generate(engine)
    assert url in caught.value.what and "ConnectError" in str(caught.value.got)
    fake.restart()
    with running(fake.app(), port=int(url.rpartition(":")[2])):
        assert_same(generate(engine), before)
    engine.close()


def test_a_slow_answer_is_an_error_at_once(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    options = HttpOptions(read_timeout_s=0.3, max_attempts=3, backoff_s=0.01)
    engine = SglangEngine(served[1], glm5, record="both", lora=True, options=options)
    fake.faults.add("/generate", 1.0)
    with pytest.raises(EngineError, match="/generate did not answer in time") as caught:
        engine.generate(make_requests((5,)), make_sampling(), record="none")
    assert fake.faults.num_requests["/generate"] == 1
    assert "0.3 s" in str(caught.value.got)


def test_requests_are_in_flight_together_but_not_too_many(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    for most in (1, 3):
        options = HttpOptions(num_in_flight=most, max_attempts=1)
        engine = SglangEngine(served[1], glm5, record="both", lora=True, options=options)
        fake.faults.most_at_once = 0
        fake.faults.add("/generate", *[0.1] * 6)
        engine.generate(make_requests((5,) * 6), make_sampling(max_new_tokens=1), record="none")
        assert fake.faults.most_at_once == most


def test_after_an_error_nothing_more_begins(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    options = HttpOptions(num_in_flight=1, max_attempts=1)
    engine = SglangEngine(served[1], glm5, record="both", lora=True, options=options)
    fake.faults.add("/generate", None, 400)
    with pytest.raises(EngineError, match="refused request prompt-1"):
        engine.generate(make_requests((5,) * 20), make_sampling(), record="none")
    assert fake.faults.num_requests["/generate"] < 10


def of_meta(change: Callable[[Meta], None]) -> Any:
    def edit(content: Any) -> Any:
        change(content["meta_info"])
        return content

    return edit


def meta_without(name: str) -> Any:
    return of_meta(lambda meta: meta.pop(name))


def set_meta(name: str, value: Any) -> Any:
    return of_meta(lambda meta: meta.__setitem__(name, value))


def set_triple(place: int, column: int, value: Any) -> Any:
    return of_meta(
        lambda meta: meta["output_token_logprobs"][place].__setitem__(column, value),
    )


def set_first_token(value: Any) -> Any:
    return lambda content: set_triple(0, 1, value)(content | {"output_ids": [value]})


NAN, INF = float("nan"), float("inf")
MALFORMED = {
    "no object": (lambda content: [content], "something else than a completion"),
    "no meta_info": (lambda content: {"text": "x"}, "something else than a completion"),
    "no reason": (meta_without("finish_reason"), "something else than a completion"),
    "aborted": (
        set_meta("finish_reason", {"type": "abort", "message": "out of memory"}),
        "broke request prompt-0 off",
    ),
    "nan happened": (
        set_meta("finish_reason", {"type": "stop", "matched": "NaN happened"}),
        "broke request prompt-0 off",
    ),
    "other reason": (set_meta("finish_reason", {"type": "tired"}), "an end that is none"),
    "no list": (meta_without("output_token_logprobs"), "no log-probability for every token"),
    "a lone pair": (set_meta("output_token_logprobs", [-1.0, 3]), "for every token"),
    "no pairs": (set_meta("output_token_logprobs", [[-1.0]]), "for every token"),
    "short": (of_meta(lambda m: m["output_token_logprobs"].pop()), "for every token"),
    "other tokens": (set_triple(1, 1, 319), "for every token"),
    "empty": (
        lambda content: set_meta("output_token_logprobs", [])(content | {"output_ids": []}),
        "no tokens",
    ),
    "null log-prob": (set_triple(1, 0, None), "a log-probability that is none, of token 1"),
    "nan": (set_triple(2, 0, NAN), "a log-probability that is none, of token 2"),
    "inf": (set_triple(0, 0, -INF), "a log-probability that is none, of token 0"),
    "positive": (set_triple(0, 0, 0.1), "a log-probability that is none, of token 0"),
    "other vocabulary": (set_first_token(320), "tokens of another model"),
    "negative id": (set_first_token(-1), "tokens of another model"),
    "id is text": (set_first_token("a"), "tokens of another model"),
    "too many": (
        of_meta(lambda meta: meta["output_token_logprobs"].append([-1.0, 3, None])),
        "tokens after the end",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_reply_names_the_request(
    engine: SglangEngine, fake: FakeSglang, case: str
) -> None:
    change, message = MALFORMED[case]
    fake.faults.add("/generate", change)
    with pytest.raises(EngineError, match="prompt-0") as caught:
        engine.generate(make_requests((5,)), make_sampling(), record="none")
    assert message in caught.value.what


def test_a_stop_at_a_token_that_was_not_asked_for(
    engine: SglangEngine, fake: FakeSglang, local: HfEngine
) -> None:
    (free, *_) = local.generate(make_requests((5,)), make_sampling(), record="none")
    fake.extra_eos = (int(free.response_ids[2]),)
    with pytest.raises(EngineError, match="stopped at another token") as caught:
        engine.generate(make_requests((5,)), make_sampling(stop_token_ids=(319,)), record="none")
    assert f"add {fake.extra_eos[0]}" in str(caught.value.remedy)
    # without stop tokens the server is told to go on
    engine.generate(make_requests((5,)), make_sampling(), record="none")


def test_tokens_behind_a_stop_token(engine: SglangEngine, local: HfEngine) -> None:
    (free, *_) = local.generate(make_requests((5,)), make_sampling(), record="none")
    stops = (int(free.response_ids[-1]), int(free.response_ids[0]))
    rollouts = engine.generate(
        make_requests((5,)), make_sampling(stop_token_ids=stops), record="none"
    )
    assert len(rollouts[0].response_ids) == 1


def shorter(name: str) -> Any:
    """Without the last number."""
    return of_meta(
        lambda meta: meta.__setitem__(name, encode(decode(meta[name])[:-1])),
    )


def decode(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), np.int32)


BAD_RECORDS = {
    "no base64": (lambda name: set_meta(name, "%%%"), "base64"),
    "cut base64": (lambda name: of_meta(lambda m: m.update({name: m[name][:-1]})), "base64"),
    "no text": (lambda name: set_meta(name, 7), "base64"),
    "cut bytes": (
        lambda name: set_meta(name, base64.b64encode(b"abc").decode()),
        "whole numbers of int32",
    ),
    "too short": (shorter, "queries x"),
    "empty": (lambda name: set_meta(name, ""), "queries x"),
    "other dtype": (lambda name: set_meta(f"{name}_dtype", "float16"), "int32"),
}


@pytest.mark.parametrize("name", ["routed_experts", "indexer_topk"])
@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_bad_record_names_the_request(
    engine: SglangEngine, fake: FakeSglang, name: str, case: str
) -> None:
    change, expected = BAD_RECORDS[case]
    fake.faults.add("/generate", change(name))
    with pytest.raises(ReplayError, match=f"{name} of request prompt-0") as caught:
        engine.generate(make_requests((9,)), make_sampling(), record="both")
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize("name", ["routed_experts", "indexer_topk"])
def test_a_missing_record_names_the_flag(engine: SglangEngine, fake: FakeSglang, name: str) -> None:
    fake.faults.add("/generate", meta_without(name))
    with pytest.raises(EngineError, match=f"no {name} of request prompt-0") as caught:
        engine.generate(make_requests((9,)), make_sampling(), record="both")
    assert f"--enable-return-{name.replace('_', '-')}" in str(caught.value.expected)


def test_a_wrong_number_of_layers_is_a_bad_record(engine: SglangEngine, fake: FakeSglang) -> None:
    fake.faults.add("/generate", set_meta("indexer_topk_num_layers", 5))
    with pytest.raises(ReplayError, match="indexer_topk of request prompt-0"):
        engine.generate(make_requests((9,)), make_sampling(), record="both")


def test_what_is_no_url() -> None:
    with pytest.raises(EngineError, match="no URL of a server"):
        SglangEngine("localhost:30000", None, record="none", lora=False)  # type: ignore[arg-type]


def test_a_key_goes_with_every_request(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    from fastapi import Header

    app, keys = fake.app(), []
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") != "/health"]

    def health(authorization: str = Header()) -> None:
        keys.append(authorization)

    app.get("/health")(health)
    with running(app) as url:
        options = HttpOptions(api_key="secret")
        SglangEngine(url, glm5, record="none", lora=False, options=options)
    assert keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("quantization", "model", "products"),
    [
        (None, {"fp8": True}, "fp8"),
        ("fp8", {"fp8": True}, "fp8"),
        (None, {}, "exact"),
        # by a scheme of its own, not in blocks
        ("fp8", {}, "other"),
        ("w8a8_int8", {"fp8": True}, "other"),
        (None, None, "untold"),
        ("fp8", None, "untold"),
    ],
)
def test_how_the_server_multiplies_is_read_from_what_it_tells(
    fake: FakeSglang,
    served: tuple[FakeSglang, str],
    glm5: Glm5Config,
    tiny_folder: TinyFolder,
    quantization: str | None,
    model: dict[str, Any] | None,
    products: str,
) -> None:
    path = "/on/the/server" if model is None else str(tiny_folder("5", **model))
    fake.flags |= {"quantization": quantization, "model_path": path}
    engine = SglangEngine(served[1], glm5, record="none", lora=False, options=FAST)
    assert engine.products == products


def test_a_server_that_names_no_model(
    fake: FakeSglang, served: tuple[FakeSglang, str], glm5: Glm5Config
) -> None:
    engine = SglangEngine(served[1], glm5, record="none", lora=False, options=FAST)
    assert engine.products == "untold"
