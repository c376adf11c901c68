"""Run files of reinforcement learning: what tells them, and what cannot be right."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import glm5
from glm5.errors import ConfigError
from glm5.rl.rewards import DEFAULT_TIMEOUT_SECONDS
from glm5.rl.run_config import RlConfig, read_run
from glm5.train.run_config import RunConfig
from tests.rl.running import rl_config, rl_tables
from tests.training import run_tables, write_toml


def problem(tmp_path: Path, **sections: dict[str, Any] | None) -> str:
    with pytest.raises(ConfigError) as caught:
        rl_config(tmp_path / "hf", tmp_path / "run", **sections)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    run = rl_config(tmp_path / "hf", tmp_path / "run")
    assert (run.rl.clip_low, run.rl.clip_high, run.rl.normalise) == (0.2, 0.28, "token")
    assert (run.rl.updates, run.rl.replay, run.rl.equal_groups) == (1, "none", "skip")
    assert run.rl.divide_by_std and run.rl.num_resamples == 0
    assert (run.rl.dual_clip, run.rl.is_low, run.rl.is_high, run.rl.kl_coeff) == (None,) * 3 + (0,)
    assert (run.rollout.temperature, run.rollout.top_p) == (1.0, 1.0)
    assert (run.gap.max_kl, run.gap.max_abs_diff) == (None, None)
    assert run.indexer_loss_coeff == 0


def test_the_table_rl_tells_the_kind(tmp_path: Path) -> None:
    rl = write_toml(tmp_path / "rl.toml", rl_tables(tmp_path / "hf", tmp_path / "run"))
    sft = write_toml(tmp_path / "sft.toml", run_tables(tmp_path / "hf", tmp_path / "run"))
    assert isinstance(read_run(rl), RlConfig)
    assert isinstance(read_run(sft), RunConfig)
    # an override is of a setting, not of the kind
    with pytest.raises(ConfigError, match=r"rl.*unknown key"):
        read_run(sft, ["rl.group_size=4"])
    run = read_run(rl, ["rl.group_size=7", "rollout.temperature=0.5"])
    assert isinstance(run, RlConfig)
    assert (run.rl.group_size, run.rollout.temperature) == (7, 0.5)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rl": {"group_sise": 4}}, "rl.group_sise: unknown key; the nearest known name is rl.gro"),
        ({"rl": {"group_size": 1}}, "rl.group_size: got 1, expected greater than or equal to 2"),
        ({"rl": {"updates": 4}}, "updates 4 are more than prompts_per_step 3"),
        ({"rl": {"is_low": 2.0, "is_high": 0.5}}, "is_low 2.0 is above is_high 0.5"),
        ({"rl": {"max_resamples": 2}}, "max_resamples does nothing with equal_groups skip"),
        ({"rl": {"replay": "all"}}, "rl.replay: got 'all'"),
        ({"rollout": {"engine": "vllm"}}, "rollout.engine: got 'vllm'"),
        ({"rollout": {"engine": "sglang"}}, "engine sglang needs url"),
        ({"rollout": {"engine": "openai", "url": "http://x"}}, "engine openai needs model"),
        ({"rollout": {"url": "http://x"}}, "url does nothing with engine hf"),
        (
            {"rollout": {"engine": "sglang", "url": "http://x", "dtype": "float32"}},
            "dtype does nothing with engine sglang",
        ),
        (
            {"rollout": {"engine": "openai", "url": "u", "model": "m"}, "rl": {"replay": "both"}},
            "rl.replay both needs an engine that records its choices",
        ),
        (
            {"rollout": {"engine": "openai", "url": "u", "model": "m", "temperature": 0.7}},
            "temperature 0.7 is not in the log-probabilities",
        ),
        (
            {"rollout": {"engine": "openai", "url": "u", "model": "m", "sleep": True}},
            "sleep does nothing with engine openai",
        ),
        (
            {"rollout": {"latent_norm_eps": 1e-5}, "model": {"latent_norm_eps": 1e-6}},
            "model.latent_norm_eps 1e-06 and rollout.latent_norm_eps 1e-05 differ",
        ),
        ({"lora": None, "rl": {"kl_coeff": 0.1}}, r"kl_coeff 0.1 needs \[lora\]"),
        (
            {"lora": None, "rollout": {"engine": "openai", "url": "u", "model": "m"}},
            "full training needs an engine that loads weights",
        ),
        (
            {"rollout": {"engine": "sglang", "url": "u", "fp8_activations": True}},
            "fp8_activations does nothing with engine sglang",
        ),
        (
            {"lora": None, "rollout": {"fp8_activations": True}},
            r"fp8_activations needs \[lora\]",
        ),
        ({"lora": None, "layout": {"tp": 2}}, "a split model does not have on one rank"),
        (
            {"lora": None, "optimizer": {"weight_decay": 0.1}},
            "weight_decay 0.1 would shrink the indexer",
        ),
        (
            {"lora": {"dropout": 0.1, "targets": ["o_proj"]}},
            "lora.dropout 0.1 would train another policy",
        ),
        ({"lora": {"train": ["norms"]}, "rl": {"kl_coeff": 0.1}}, "lora.train changes the base"),
        (
            {"lora": {"train": ["norms"]}, "rollout": {"engine": "sglang", "url": "u"}},
            "lora.train cannot be sampled",
        ),
        ({"model": {"mtp": True}}, "model.mtp has no loss"),
        (
            {"lora": None, "train": {"indexer_loss_coeff": 0.1}, "rl": {"normalise": "sequence"}},
            "needs rl.normalise token",
        ),
        ({"lora": {"targets": ["wq_b"]}}, "leaves the indexer's adapters untrained"),
        ({"reward": {"kind": "regex", "function": None}}, "kind regex needs pattern"),
        ({"reward": {"pattern": "x"}}, "pattern does nothing with kind function"),
        ({"reward": {"timeout_seconds": 1.0}}, "timeout_seconds does nothing with kind function"),
        ({"gap": {"max_kl": 0.0}}, "gap.max_kl: got 0.0, expected greater than 0"),
        (
            {"optimizer": {"warmup_steps": 6}, "rl": {"updates": 2}},
            r"warmup_steps 6 is not below train.steps 3 \* rl.updates 2",
        ),
        ({"train": {"global_batch_size": 4}}, "train.global_batch_size: unknown key"),
        ({"data": {"seq_length": 64}}, "data.seq_length: unknown key"),
    ],
)
def test_what_cannot_be_right(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    assert re.search(message, problem(tmp_path, **sections))


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    tables = rl_tables(tmp_path / "hf", tmp_path / "run")
    tables["data"]["prompts"] = ["a.jsonl", "b.parquet"]
    tables["reward"]["function"] = "rewards/mine.py:score"
    run = read_run(write_toml(tmp_path / "run.toml", tables))
    assert isinstance(run, RlConfig)
    assert run.data.prompts == (tmp_path / "a.jsonl", tmp_path / "b.parquet")
    assert run.reward.function == f"{tmp_path}/rewards/mine.py:score"
    tables["reward"]["function"] = "package.module:score"
    run = read_run(write_toml(tmp_path / "run.toml", tables))
    assert isinstance(run, RlConfig) and run.reward.function == "package.module:score"


def test_what_is_recorded_is_the_run(tmp_path: Path) -> None:
    run = rl_config(
        tmp_path / "hf",
        tmp_path / "run",
        rl={"equal_groups": "resample", "dual_clip": 3.0},
        rollout={"stop_token_ids": [3, 4]},
    )
    recorded = json.loads(json.dumps(run.to_toml_dict()))
    again = RlConfig.from_dict(recorded, source="the record")
    assert again == run.model_copy(update={"train": again.train})
    assert run.differences(again) == []
    # so is one whose settings are left to their defaults
    run = rl_config(tmp_path / "hf", tmp_path / "run")
    assert run.differences(RlConfig.from_dict(run.to_toml_dict(), source="the record")) == []


def test_what_may_change_on_resume(tmp_path: Path) -> None:
    def run(**sections: Any) -> RlConfig:
        server = {"engine": "sglang", "url": "http://one"}
        sections["rollout"] = server | sections.get("rollout", {})
        return rl_config(tmp_path / "hf", tmp_path / "run", **sections)

    free = run(
        rollout={"url": "http://two", "max_attempts": 3},
        gap={"max_kl": 0.1},
        train={"steps": 9},
        rl={"max_tokens_per_micro_batch": 128},
    )
    assert run().differences(free) == []
    other = run(rl={"group_size": 5}, rollout={"temperature": 0.5}, reward={"function": "a.b:c"})
    assert run().differences(other) == ["reward.function", "rl.group_size", "rollout.temperature"]


def test_free_fields_exist(tmp_path: Path) -> None:
    from glm5.train.run_errors import known_names

    assert set(RlConfig.free_on_resume) <= set(known_names(RlConfig))
    assert {".".join(key) for key in RlConfig.resolvers} <= set(known_names(RlConfig))


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(glm5.__file__).parents[1])!r}); "
        "import glm5.rl.run_config; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_time_limit_of_a_reward_is_the_one_that_is_told() -> None:
    described = RlConfig.model_fields["reward"].annotation.model_fields["timeout_seconds"]
    assert f"absent: {DEFAULT_TIMEOUT_SECONDS:g}." in (described.description or "")


def test_every_field_is_described() -> None:
    for name in ("data", "rl", "rollout", "reward", "gap"):
        section: Any = RlConfig.model_fields[name].annotation
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key}"
