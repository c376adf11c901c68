"""Whole short runs: what is learnt, resumed, refused, and survived."""

import gc
import json
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.checkpoint.adapter_io import read_adapter
from glm5.checkpoint.ckpt_dir import read_record, saved_steps, step_folder
from glm5.config import Glm5Config
from glm5.errors import ConfigError, DataError, EngineError, GapError, Glm5Error, RewardError
from glm5.rl.choices import Choices
from glm5.rl.engines.hf import HfEngine
from glm5.rl.rollout import Rollout
from glm5.rl.run import train_rl
from glm5.rl.run_config import RlConfig
from glm5.rl.samples import samples_file
from glm5.rl.sync import SYNC_FOLDER
from glm5.train.metrics import read_metrics
from glm5.train.run import train
from tests.rl.running import FakeEngine, dies_in_call, printable_share, rl_config, without_times
from tests.tiny_models import TinyFolder
from tests.training import differing, run_config, saved_state

# What depends on neither engine nor model is enough for the gap of a made-up engine.
FAKE: dict[str, Any] = {"rollout": {"max_new_tokens": 6}}


def metrics(out: Path) -> list[dict[str, Any]]:
    return without_times(read_metrics(out))


def test_a_run_leaves_all_that_it_should(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    told, shown = [], []
    run = rl_config(folder, out, rl={"replay": "both", "kl_coeff": 0.1})
    result = train_rl(run, say=told.append, show=shown.append, quiet=True)
    assert (result.step, result.stopped_by) == (3, None)
    assert saved_steps(out) == [3]
    record = read_record(result.checkpoint)
    assert record.kind == "adapter" and record.run == run.to_toml_dict()
    assert any(line.startswith("prompts: 6") for line in told) and len(shown) == 1
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        # the same model on both sides
        assert line["gap_abs_diff"] < 1e-5 and line["gap_kl"] < 1e-9
        assert line["gap_routing_overlap"] == line["gap_topk_overlap"] == 1
        assert line["policy_ratio"] == 1 and line["trained_tokens"] > 0
        assert line["grad_norm"] > 0 and 0 < line["reward"] < 1
    # the reference is the base, and that is where the run starts
    assert lines[0]["policy_ref_kl"] == 0 < lines[2]["policy_ref_kl"]
    table = [json.loads(text) for text in samples_file(out, 2).read_text().splitlines()]
    assert len(table) == 12
    assert all(row["abs_diff"] < 1e-5 for row in table if row["advantage"] is not None)
    assert sum(row["reward"] for row in table) / 12 == pytest.approx(lines[1]["reward"])


@pytest.mark.parametrize("kind", ["lora", "everything"])
def test_a_resumed_run_is_the_whole_run(tiny_folder: TinyFolder, tmp_path: Path, kind: str) -> None:
    folder = tiny_folder("5")
    sections: dict[str, Any] = {
        "rl": {"replay": "both", "updates": 2, "is_high": 2.0},
        **({} if kind == "lora" else {"lora": None, "optimizer": {"lr": 1e-3}}),
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_rl(rl_config(folder, whole, **sections, train={"steps": 4}), quiet=True)
    train_rl(rl_config(folder, parts, **sections, train={"steps": 2}), quiet=True)
    train_rl(rl_config(folder, parts, **sections, train={"steps": 4}), quiet=True)
    assert metrics(parts) == metrics(whole)
    assert differing(saved_state(parts, 4), saved_state(whole, 4)) == []
    for step in (3, 4):
        assert samples_file(parts, step).read_text() == samples_file(whole, step).read_text()
    # with several updates the policy moves away from the one that sampled
    assert any(line["policy_ratio"] != 1 for line in metrics(whole))


def test_the_engine_gets_every_version_before_it_samples(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    engine = FakeEngine()
    train_rl(rl_config(folder, out, **FAKE), engine=engine, quiet=True)
    assert engine.events == [
        "adapter 0", "generate", "adapter 1", "generate", "adapter 2", "generate", "close"
    ]  # fmt: skip
    # of the folders only the last one is left, for a server that starts again
    (left,) = (out / SYNC_FOLDER).iterdir()
    adapter = read_adapter(left, Glm5Config.from_hf(folder))
    attention = [pair for path, pair in adapter.factors.items() if "self_attn" in path]
    assert len(attention) == 15 and all(bool(pair.b.any()) for pair in attention)


def test_a_resumed_run_hands_over_what_it_saved(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    train_rl(rl_config(folder, out, **FAKE, train={"steps": 2}), engine=FakeEngine(), quiet=True)
    engine = FakeEngine()
    train_rl(rl_config(folder, out, **FAKE), engine=engine, quiet=True)
    assert engine.events == ["adapter 2", "generate", "close"]


def test_full_training_hands_over_weights(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    engine = FakeEngine()
    run = rl_config(tiny_folder("5"), tmp_path / "run", **FAKE, lora=None, train={"steps": 2})
    train_rl(run, engine=engine, quiet=True)
    assert engine.events == ["model 0", "generate", "model 1", "generate", "close"]


def test_a_dead_engine_costs_no_step(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, whole, out = tiny_folder("5"), tmp_path / "whole", tmp_path / "died"
    train_rl(rl_config(folder, whole, **FAKE), engine=FakeEngine(), quiet=True)
    run = rl_config(folder, out, **FAKE)
    with pytest.raises(EngineError, match="the server is gone"):
        train_rl(run, engine=FakeEngine(change=dies_in_call(3)), quiet=True)
    assert saved_steps(out) == [2]
    train_rl(run, engine=FakeEngine(), quiet=True)
    assert metrics(out) == metrics(whole)
    assert differing(saved_state(out, 3), saved_state(whole, 3)) == []


def test_a_signal_ends_the_step_and_saves(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, whole, out = tiny_folder("5"), tmp_path / "whole", tmp_path / "stopped"
    train_rl(rl_config(folder, whole, **FAKE), engine=FakeEngine(), quiet=True)
    calls = iter([False, True, False])

    def stop(rollouts: list[Rollout]) -> list[Rollout]:
        if next(calls):
            os.kill(os.getpid(), signal.SIGTERM)
        return rollouts

    run = rl_config(folder, out, **FAKE)
    result = train_rl(run, engine=FakeEngine(change=stop), quiet=True)
    assert (result.step, result.stopped_by) == (2, "SIGTERM")
    train_rl(run, engine=FakeEngine(), quiet=True)
    assert metrics(out) == metrics(whole)
    assert differing(saved_state(out, 3), saved_state(whole, 3)) == []


def test_an_engine_that_is_dead_at_once_leaves_nothing(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    engine = FakeEngine(change=dies_in_call(1))
    with pytest.raises(EngineError):
        train_rl(rl_config(tiny_folder("5"), tmp_path / "run", **FAKE), engine=engine, quiet=True)
    assert saved_steps(tmp_path / "run") == []
    assert engine.events[-1] == "close"


@dataclass
class Watched:
    """Of an engine: how many choices of earlier calls are still alive when one begins."""

    engine: HfEngine
    choices: list[weakref.ref[Choices]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, *args: Any, **kwargs: Any) -> list[Rollout]:
        self.alive.append(sum(choices() is not None for choices in self.choices))
        rollouts = self.engine.generate(*args, **kwargs)
        self.choices += [weakref.ref(r.choices) for r in rollouts if r.choices is not None]
        return rollouts


def test_choices_live_for_one_step(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Freed by their last reference: the collector of cycles is off."""
    folder = tiny_folder("5")
    engine = Watched(HfEngine(folder, Glm5Config.from_hf(folder), torch.device("cpu")))
    run = rl_config(folder, tmp_path / "run", rl={"replay": "both", "updates": 2})
    gc.disable()
    try:
        train_rl(run, engine=engine, quiet=True)
    finally:
        gc.enable()
    assert len(engine.choices) == 36 and engine.alive == [0, 0, 0]


def fails(text: str, label: object, row: object) -> float:
    raise KeyError("no such answer")


def always(text: str, label: object, row: object) -> float:
    return 1.0


def test_a_reward_that_fails_names_the_completion(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    run = rl_config(tiny_folder("5"), tmp_path / "run", **FAKE, reward=named(fails))
    with pytest.raises(RewardError, match=r"(?s)step 1 prompt 0 \(.*jsonl:\d\) sample 0.*KeyError"):
        train_rl(run, engine=FakeEngine(), quiet=True)


def named(function: Callable[..., float]) -> dict[str, Any]:
    return {"function": f"{Path(__file__)}:{function.__name__}"}


def test_steps_without_anything_to_learn(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    run = rl_config(folder, out, **FAKE, reward=named(always), train={"steps": 2})
    train_rl(run, engine=FakeEngine(), quiet=True)
    lines = read_metrics(out)
    assert [line["groups_taught"] for line in lines] == [0, 0]
    assert all("loss" not in line and line["reward"] == 1 for line in lines)
    adapters = [value for name, value in saved_state(out, 2).items() if name.endswith(".b")]
    assert adapters and not any(value.any() for value in adapters)
    rows = [json.loads(text) for text in samples_file(out, 1).read_text().splitlines()]
    assert all(row["advantage"] is None and row["abs_diff"] == "NaN" for row in rows)


def only_long_prompts(text: str, label: object, row: Any) -> float:
    return 1.0 if row["prompt"] == "repeat ab" else printable_share(text, label, row)


def test_a_checkpoint_from_before_the_first_update(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The first step has nothing to learn from, the second one has."""
    folder, whole, parts = tiny_folder("5"), tmp_path / "whole", tmp_path / "parts"
    sections: dict[str, Any] = {
        **FAKE,
        "data": {"shuffle": False},
        "rl": {"prompts_per_step": 1},
        "optimizer": {"weight_decay": 0.1},
        "reward": named(only_long_prompts),
    }
    for out, steps in ((parts, 1), (parts, 3), (whole, 3)):
        run = rl_config(folder, out, **sections, train={"steps": steps, "save_every": 1, "keep": 3})
        train_rl(run, engine=FakeEngine(), quiet=True)
    assert [line["groups_taught"] for line in metrics(whole)][:2] == [0, 1]
    assert metrics(parts) == metrics(whole)
    assert differing(saved_state(parts, 3), saved_state(whole, 3)) == []


def test_the_gap_stops_a_run_before_it_learns(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = rl_config(tiny_folder("5"), out, **FAKE, gap={"max_abs_diff": 0.1})
    with pytest.raises(GapError, match=r"(?s)max_abs_diff 0.1.*worst token.*step 1 prompt"):
        train_rl(run, engine=FakeEngine(), quiet=True)
    assert saved_steps(out) == [] and samples_file(out, 1).is_file()


def test_a_stale_adapter_is_found(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    class Stale(FakeEngine):
        def load_adapter(self, folder: Path, version: int) -> None:
            super().load_adapter(folder, min(version, 1))

    with pytest.raises(EngineError, match=r"(?s)step 3 .* stale weights.*version 1.*version 2"):
        train_rl(rl_config(tiny_folder("5"), tmp_path / "run", **FAKE), engine=Stale(), quiet=True)


def refused(run: RlConfig, kind: type[Glm5Error], message: str, **options: Any) -> None:
    with pytest.raises(kind, match=message):
        train_rl(run, quiet=True, **options)


def test_an_engine_that_does_not_record_is_refused_at_once(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    out, engine = tmp_path / "run", FakeEngine()
    run = rl_config(tiny_folder("5"), out, **FAKE, rl={"replay": "indexer"})
    refused(run, ConfigError, "(?s)does not record its choices.*'indexer'", engine=engine)
    assert not engine.calls and not out.exists()


def test_runs_of_two_kinds_do_not_share_a_folder(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    train(run_config(folder, out, train={"steps": 1}), quiet=True)
    run = rl_config(folder, out)
    refused(run, ConfigError, "the kind of run, from supervised fine-tuning to reinforcement")


def test_changed_settings_and_rewards_are_found(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    reward = tmp_path / "reward.py"
    reward.write_text("def score(text, label, row):\n    return len(text)\n")
    sections: dict[str, Any] = {**FAKE, "reward": {"function": f"{reward}:score"}}
    train_rl(
        rl_config(folder, out, **sections, train={"steps": 1}), engine=FakeEngine(), quiet=True
    )
    refused(rl_config(folder, out, **sections, rl={"group_size": 5}), ConfigError, "rl.group_size")
    reward.write_text("def score(text, label, row):\n    return -len(text)\n")
    refused(rl_config(folder, out, **sections), ConfigError, "changed: reward.function")


def test_what_does_not_fit_a_micro_batch(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5")
    run = rl_config(folder, tmp_path / "run", data={"max_prompt_tokens": 60})
    refused(run, ConfigError, "(?s)prompts of 60 tokens.*at most 64 tokens together")
    run = rl_config(folder, tmp_path / "run", rollout={"max_new_tokens": 64})
    refused(run, ConfigError, "(?s)do not fit.*prompts of 1 tokens")
    # the limit that was not given is not the one to raise
    run = rl_config(folder, tmp_path / "run", rollout={"max_new_tokens": 50})
    refused(run, DataError, "(?s)too long.*raise .* rl.max_tokens_per_micro_batch")


def test_a_stop_token_that_is_never_drawn(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    run = rl_config(tiny_folder("5"), tmp_path / "run", rollout={"stop_token_ids": [3, 320, 999]})
    refused(run, ConfigError, "(?s)stop_token_ids.*320, 999.*ids below 320")


def test_a_server_norms_latents_as_the_config_says(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, out = tiny_folder("5"), tmp_path / "run"
    server = {"engine": "sglang", "url": "http://localhost:1"}
    wrong = rl_config(folder, out, rollout=server, model={"latent_norm_eps": 1e-6})
    refused(wrong, ConfigError, "would norm latents differently", engine=FakeEngine())
    run = rl_config(folder, out, rollout=server, train={"steps": 1})
    result = train_rl(run, engine=FakeEngine(), quiet=True)
    assert read_record(result.checkpoint).config["latent_norm_eps"] == 1e-5


def test_a_perturbed_adapter_moves_both_sides(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """High rates move the adapters far from zero; the engine follows."""
    out = tmp_path / "run"
    run = rl_config(tiny_folder("5.2"), out, optimizer={"lr": 0.3}, rl={"replay": "both"})
    train_rl(run, quiet=True)
    lines = read_metrics(out)
    assert lines[2]["gap_abs_diff"] < 1e-5
    assert torch.tensor([abs(v).max() for v in factors(out, 3)]).max() > 0.3


def factors(out: Path, step: int) -> list[torch.Tensor]:
    state = saved_state(out, step)
    assert step_folder(out, step).is_dir()
    return [value for name, value in state.items() if name.endswith(".b") and ".pairs." in name]
