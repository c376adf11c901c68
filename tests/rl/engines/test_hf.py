"""Generation with the key cache in padded batches is the full forward of every row alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5.checkpoint.adapter_io import load_peft_model, write_serving_adapter
from glm5.checkpoint.hf_model import load_hf_model
from glm5.config import Glm5Config
from glm5.errors import EngineError
from glm5.parity.hf_side import observe_hf
from glm5.rl.engines.hf import HfEngine
from glm5.rl.engines.hf_generate import Completion
from glm5.rl.rollout import Rollout, Sampling
from tests.adapters import adapter_of, make_factors, write
from tests.rl.engines.conftest import MakeAdapter
from tests.rl.engines.prompts import LENGTHS, make_requests, make_sampling
from tests.tiny_models import TinyFolder

CPU = torch.device("cpu")
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def engine(folder: Path, glm5: Glm5Config) -> HfEngine:
    return HfEngine(folder, glm5, CPU)


@pytest.fixture(scope="module")
def reference(folder: Path, glm5: Glm5Config) -> Any:
    return load_hf_model(folder, glm5)


def all_tokens(rollout: Rollout) -> Tensor:
    return torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()


@torch.no_grad()
def full_log_probs(model: Any, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Of the response, from one forward without a cache."""
    tokens, prompt = all_tokens(rollout), len(rollout.prompt_ids)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, prompt - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, tokens[prompt:, None])[:, 0]


def worst(model: Any, rollouts: Sequence[Rollout], temperature: float = 1.0) -> float:
    return max(
        float((full_log_probs(model, r, temperature) - torch.from_numpy(r.log_probs)).abs().max())
        for r in rollouts
    )


@pytest.mark.parametrize("variant", ["5", "5.2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_decode_is_the_full_forward(
    tiny_folder: TinyFolder, variant: str, temperature: float
) -> None:
    folder = tiny_folder(variant)
    glm5 = Glm5Config.from_hf(folder)
    engine = HfEngine(folder, glm5, CPU)
    sampling = make_sampling(temperature=temperature, max_new_tokens=NEW_TOKENS)
    rollouts = engine.generate(make_requests(), sampling, record="none")
    assert [len(r.response_ids) for r in rollouts] == [NEW_TOKENS] * len(LENGTHS)
    assert max(r.num_tokens for r in rollouts) > 2 * glm5.index_topk
    assert worst(load_hf_model(folder, glm5), rollouts, temperature) < 1e-5


def test_the_check_sees_another_temperature(engine: HfEngine, reference: Any) -> None:
    rollouts = engine.generate(make_requests(), make_sampling(), record="none")
    assert worst(reference, rollouts, temperature=1.01) > 1e-3


def test_a_request_does_not_depend_on_its_batch(engine: HfEngine) -> None:
    requests, sampling = make_requests(), make_sampling(max_new_tokens=NEW_TOKENS)
    together = engine.generate(requests, sampling, record="none")
    for request, rollout in zip(reversed(requests), reversed(together), strict=True):
        (alone,) = engine.generate([request], sampling, record="none")
        assert np.array_equal(alone.response_ids, rollout.response_ids)
        assert np.allclose(alone.log_probs, rollout.log_probs, atol=1e-5)


def test_batches_are_cut_and_stay_in_order(folder: Path, glm5: Glm5Config) -> None:
    small = HfEngine(folder, glm5, CPU, max_batch=3)
    whole = HfEngine(folder, glm5, CPU)
    requests, sampling = make_requests((5, 9, 4, 7, 6, 10, 3)), make_sampling()
    rollouts = small.generate(requests, sampling, record="none")
    assert [r.request for r in rollouts] == [r.name for r in requests]
    for rollout, expected in zip(
        rollouts, whole.generate(requests, sampling, record="none"), strict=True
    ):
        assert np.array_equal(rollout.response_ids, expected.response_ids)
    assert small.generate([], sampling, record="none") == []


def test_other_seeds_draw_other_tokens(engine: HfEngine) -> None:
    (request, *_) = make_requests()
    sampling = make_sampling(max_new_tokens=NEW_TOKENS)
    drawn = {
        tuple(rollout.response_ids.tolist())
        for rollout in engine.generate(
            [type(request)(request.name, request.prompt_ids, seed) for seed in range(5)],
            sampling,
            record="none",
        )
    }
    assert len(drawn) == 5


def test_stop_tokens_end_a_row_and_belong_to_it(engine: HfEngine, reference: Any) -> None:
    requests = make_requests()
    free = engine.generate(requests, make_sampling(max_new_tokens=NEW_TOKENS), record="none")
    # row 1 stops in the middle, row 0 at its first token, the others where they happen to
    stops = (int(free[1].response_ids[4]), int(free[0].response_ids[0]))
    sampling = make_sampling(max_new_tokens=NEW_TOKENS, stop_token_ids=stops)
    stopped = engine.generate(requests, sampling, record="none")
    assert len(stopped[0].response_ids) == 1 and stopped[0].finish == "stop"
    for rollout, whole in zip(stopped, free, strict=True):
        num = len(rollout.response_ids)
        assert np.array_equal(rollout.response_ids, whole.response_ids[:num])
        ends = [place for place, token in enumerate(whole.response_ids) if token in stops]
        assert (num, rollout.finish) == ((ends[0] + 1, "stop") if ends else (NEW_TOKENS, "length"))
    assert worst(reference, stopped) < 1e-5


def test_top_p_narrows_the_draw_alone(engine: HfEngine, reference: Any) -> None:
    requests = make_requests()
    rollouts = engine.generate(requests, make_sampling(top_p=1e-6), record="none")
    assert worst(reference, rollouts) < 1e-5
    for rollout in rollouts:
        tokens = all_tokens(rollout)
        logits = reference(input_ids=tokens[None], use_cache=False).logits[0]
        greedy = logits[len(rollout.prompt_ids) - 1 : -1].argmax(-1)
        assert torch.equal(greedy, tokens[len(rollout.prompt_ids) :])


def record_of(engine: HfEngine, recorded: Any, sampling: Sampling) -> list[Completion]:
    return engine.complete(make_requests(), sampling, record=recorded)


def tokens_of(completion: Completion) -> Tensor:
    prompt = torch.from_numpy(completion.request.prompt_ids).long()
    return torch.cat([prompt, torch.tensor(completion.tokens)])


def test_recorded_keys_are_those_of_one_forward(
    engine: HfEngine, reference: Any, glm5: Glm5Config
) -> None:
    full = [i for i, kind in enumerate(glm5.indexer_types) if kind == "full"]
    for completion in record_of(engine, "both", make_sampling(max_new_tokens=NEW_TOKENS)):
        tokens = tokens_of(completion)
        keys = np.concatenate(completion.keys)
        assert keys.dtype == np.int32
        assert keys.shape == (len(tokens) - 1, len(full), glm5.index_topk)
        seen = observe_hf(reference, tokens[:-1], [len(tokens) - 1], gradients=False)
        for place, layer in enumerate(full):
            for query, row in enumerate(keys[:, place]):
                chosen = sorted(row[row >= 0].tolist())
                allowed = seen.selected[layer][query]
                assert chosen == sorted(allowed[(allowed >= 0) & (allowed <= query)].tolist())
                assert len(chosen) == min(query + 1, glm5.index_topk)


def test_recorded_experts_are_those_of_one_forward(
    engine: HfEngine, reference: Any, glm5: Glm5Config
) -> None:
    sparse = [i for i, kind in enumerate(glm5.mlp_layer_types) if kind == "sparse"]
    for completion in record_of(engine, "routing", make_sampling(max_new_tokens=NEW_TOKENS)):
        assert completion.keys == []
        tokens, experts = tokens_of(completion), np.concatenate(completion.experts)
        assert experts.shape == (len(tokens) - 1, len(sparse), glm5.num_experts_per_tok)
        for place, layer in enumerate(sparse):
            expected = routed(reference, layer, tokens[:-1])
            assert np.array_equal(np.sort(experts[:, place]), np.sort(expected))


@torch.no_grad()
def routed(model: Any, layer: int, tokens: Tensor) -> Any:
    seen: list[Tensor] = []
    gate = model.model.layers[layer].mlp.gate
    handle = gate.register_forward_hook(lambda module, args, output: seen.append(output[2]))
    model(input_ids=tokens[None], use_cache=False)
    handle.remove()
    return seen[0].numpy()


def test_nothing_is_recorded_or_left_behind(engine: HfEngine) -> None:
    for completion in record_of(engine, "none", make_sampling()):
        assert completion.keys == [] and completion.experts == []
    model = engine._base
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    (rollout, *_) = engine.generate(make_requests(), make_sampling(), record="none")
    assert rollout.choices is None


def test_records_are_packed_under_their_request(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def pack(request: str, experts: Any, keys: Any, glm5: Glm5Config) -> None:
        seen[request] = (experts, keys)

    monkeypatch.setattr("glm5.rl.engines.hf.pack_choices", pack)
    rollouts = engine.generate(make_requests(), make_sampling(), record="indexer")
    assert list(seen) == [rollout.request for rollout in rollouts]
    for rollout in rollouts:
        experts, keys = seen[rollout.request]
        assert experts is None and len(keys) == rollout.num_tokens - 1


def test_adapters_replace_each_other(
    folder: Path, glm5: Glm5Config, make_adapter: MakeAdapter
) -> None:
    engine = HfEngine(folder, glm5, CPU)
    base = engine.generate(make_requests(), make_sampling(), record="none")
    previous = base
    for version, seed in ((1, 11), (2, 12)):
        engine.load_adapter(make_adapter(seed), version)
        rollouts = engine.generate(make_requests(), make_sampling(), record="both")
        assert {rollout.adapter_version for rollout in rollouts} == {version}
        alone = load_peft_model(make_adapter(seed), folder, glm5)
        assert worst(alone, rollouts) < 1e-5
        assert worst(alone, previous) > 1e-2
        previous = rollouts


def test_whole_modules_of_an_adapter_leave_with_it(
    folder: Path, glm5: Glm5Config, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    engine = HfEngine(folder, glm5, CPU)
    norm = 1 + 0.5 * torch.randn(glm5.hidden_size)
    gate = torch.randn(glm5.n_routed_experts, glm5.hidden_size)
    modules = {
        "model.norm.weight": norm,
        "model.layers.4.mlp.gate.weight": gate,
        "model.layers.4.mlp.gate.e_score_correction_bias": torch.randn(glm5.n_routed_experts),
    }
    write(tmp_path / "with", adapter_of(make_factors(glm5), modules), glm5)
    engine.load_adapter(tmp_path / "with", 1)
    rollouts = engine.generate(make_requests(), make_sampling(), record="both")
    assert worst(load_peft_model(tmp_path / "with", folder, glm5), rollouts) < 1e-5
    engine.load_adapter(make_adapter(11), 2)
    rollouts = engine.generate(make_requests(), make_sampling(), record="none")
    assert worst(load_peft_model(make_adapter(11), folder, glm5), rollouts) < 1e-5


def test_other_weights_drop_the_adapter(
    tiny_folder: TinyFolder, folder: Path, glm5: Glm5Config, make_adapter: MakeAdapter
) -> None:
    engine = HfEngine(folder, glm5, CPU)
    engine.load_adapter(make_adapter(11), 1)
    other = tiny_folder("5.2", seed=7)
    engine.load_model(other, 2)
    rollouts = engine.generate(make_requests(), make_sampling(), record="none")
    assert {rollout.adapter_version for rollout in rollouts} == {2}
    assert worst(load_hf_model(other, glm5), rollouts) < 1e-5


def test_what_it_cannot_load_is_an_error_and_never_sampled_from(
    folder: Path, glm5: Glm5Config, tmp_path: Path
) -> None:
    engine = HfEngine(folder, glm5, CPU)
    with pytest.raises(EngineError, match="did not take the adapter"):
        engine.load_adapter(tmp_path, 1)
    with pytest.raises(EngineError, match="holds no model"):
        engine.generate(make_requests(), make_sampling(), record="none")
    with pytest.raises(EngineError, match="did not take the weights"):
        engine.load_model(tmp_path, 2)
    engine.load_model(folder, 3)
    assert engine.generate(make_requests(), make_sampling(), record="none")
    engine.sleep()
    engine.wake()
    engine.close()
    with pytest.raises(EngineError, match="holds no model"):
        engine.generate(make_requests(), make_sampling(), record="none")


def test_a_folder_for_an_engine_is_not_half_loaded(
    folder: Path, glm5: Glm5Config, tmp_path: Path
) -> None:
    adapter = adapter_of(make_factors(glm5))
    serving = tmp_path / "serving"
    write_serving_adapter(serving, adapter, "sglang", config=glm5, base_name="tiny")
    engine = HfEngine(folder, glm5, CPU)
    with pytest.raises(EngineError, match="did not take the adapter") as caught:
        engine.load_adapter(serving, 1)
    assert "--for peft" in str(caught.value.remedy)
    with pytest.raises(EngineError, match="holds no model"):
        engine.generate(make_requests(), make_sampling(), record="none")


def test_weights_that_are_no_numbers_name_the_request(folder: Path, glm5: Glm5Config) -> None:
    engine = HfEngine(folder, glm5, CPU)
    with torch.no_grad():
        engine._base.lm_head.weight[5] = float("nan")
    with pytest.raises(EngineError, match="request prompt-0: the model computes"):
        engine.generate(make_requests(), make_sampling(), record="none")


@pytest.mark.parametrize("token", [-1, 320])
def test_a_prompt_of_another_model_names_the_request(engine: HfEngine, token: int) -> None:
    requests = make_requests()
    requests[2].prompt_ids[1] = token
    with pytest.raises(EngineError, match="request prompt-2: no prompt"):
        engine.generate(requests, make_sampling(), record="none")


def test_bfloat16_keeps_what_transformers_keeps(folder: Path, glm5: Glm5Config) -> None:
    engine = HfEngine(folder, glm5, CPU, torch.bfloat16)
    assert engine._base.lm_head.weight.dtype == torch.bfloat16
    assert engine._base.model.layers[4].mlp.gate.weight.dtype == torch.float32
    rollouts = engine.generate(make_requests(), make_sampling(), record="both")
    assert all(rollout.log_probs.dtype == np.float32 for rollout in rollouts)
    assert np.isfinite(np.concatenate([rollout.log_probs for rollout in rollouts])).all()


@pytest.mark.gpu
def test_on_a_gpu_it_sleeps_on_the_host(folder: Path, glm5: Glm5Config) -> None:
    engine = HfEngine(folder, glm5, torch.device("cuda"))
    before = engine.generate(make_requests(), make_sampling(), record="none")
    engine.sleep()
    assert {parameter.device.type for parameter in engine._base.parameters()} == {"cpu"}
    engine.wake()
    after = engine.generate(make_requests(), make_sampling(), record="none")
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.response_ids, other.response_ids)
