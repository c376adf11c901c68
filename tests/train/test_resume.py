"""A run that was interrupted and resumed is bit for bit the run that was not."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.checkpoint.ckpt_dir import STEPS_FOLDER, read_record, saved_steps
from glm5.errors import CheckpointError, ConfigError
from glm5.train import state as state_module
from glm5.train.metrics import MetricsLog, read_metrics
from glm5.train.run import train
from glm5.train.run_config import RunConfig
from glm5.train.session import TrainResult
from tests.tiny_models import TinyFolder
from tests.training import (
    differing,
    metrics_without_timing,
    run_config,
    saved_state,
    write_few_chats,
)

# The schedule is still moving, the batches are shuffled and span epochs, and evaluation is due.
SECTIONS: dict[str, Any] = {
    "data": {"max_samples": 9},
    "optimizer": {"lr": 3e-3, "warmup_steps": 2, "weight_decay": 0.01},
    "train": {"steps": 6, "global_batch_size": 2, "eval_every": 2},
}


def make_run(folder: Path, out: Path, **sections: Any) -> RunConfig:
    merged = {name: SECTIONS.get(name, {}) | (values or {}) for name, values in sections.items()}
    merged = SECTIONS | {n: None if sections[n] is None else v for n, v in merged.items()}
    merged["data"] = merged["data"] | {"eval": write_few_chats(folder, folder.parent / "few.jsonl")}
    return run_config(folder, out, **merged)


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """Sends this process the signal when `step` is logged, once."""
    log = MetricsLog.log

    def log_and_stop(self: MetricsLog, at: int, values: Any) -> None:
        log(self, at, values)
        if at == step:
            monkeypatch.setattr(MetricsLog, "log", log)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsLog, "log", log_and_stop)


def interrupted(run: RunConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> TrainResult:
    stop_after(step, monkeypatch)
    return train(run, quiet=True)


def assert_same_run(got: Path, expected: Path, step: int = 6) -> None:
    assert metrics_without_timing(got) == metrics_without_timing(expected)
    assert differing(saved_state(got, step), saved_state(expected, step)) == []


KINDS = {
    "lora": {},
    "lora in bf16": {"model": {"dtype": "bfloat16"}},
    "lora on float8": {"model": {"base_weights": "fp8", "recompute": "selective"}},
    "products in float8": {"model": {"base_weights": "fp8", "fp8_compute": True}},
    "everything": {"lora": None},
    "the indexer": {"lora": {"targets": ["wq_b", "o_proj"]}},
    "dropout and whole parameters": {
        "lora": {
            "targets": ["o_proj", "up_proj", "down_proj"],
            "dropout": 0.2,
            "expert_lora": "shared_outer",
            "rank_pattern": {"shared_experts.up_proj": 3},
            "train": ["router", r"layers\.1\.input_layernorm\.weight"],
        }
    },
}


def on_every_core(kind: str) -> Any:
    """The kinds that every supported Megatron-Core is tried with."""
    marks = [pytest.mark.cores] if kind in ("lora", "everything") else []
    return pytest.param(kind, marks=marks)


@pytest.mark.parametrize("kind", map(on_every_core, KINDS))
def test_three_steps_and_three_more_are_six(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tiny_folder("5")
    whole = make_run(folder, tmp_path / "whole", **KINDS[kind])
    halves = make_run(folder, tmp_path / "halves", **KINDS[kind])
    train(whole, quiet=True)
    first = interrupted(halves, 3, monkeypatch)
    assert (first.step, first.stopped_by) == (3, "SIGTERM")
    assert saved_steps(tmp_path / "halves") == [3]
    # as a killed save leaves it
    (tmp_path / "halves" / STEPS_FOLDER / ".step-00000005.partial-1").mkdir()
    said: list[str] = []
    second = train(halves, say=said.append, quiet=True)
    assert "resuming from step 3" in said
    assert list((tmp_path / "halves" / STEPS_FOLDER).glob(".*")) == []
    assert (second.step, second.stopped_by) == (6, None)
    assert_same_run(tmp_path / "halves", tmp_path / "whole")
    # what is compared holds the weights, both moments and the schedule, and does change
    end = saved_state(tmp_path / "whole", 6)
    changed = differing(saved_state(tmp_path / "halves", 3), end)
    for part in ("exp_avg.", "exp_avg_sq.", "num_steps"):
        assert any(part in name for name in changed), part
    assert sum(name.startswith("decoder.") for name in changed) > 10


def test_a_base_in_float8_is_read_again_and_not_saved(
    fp8_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": {"base_weights": "fp8"}, "train": {"steps": 3}}
    run = make_run(fp8_folder("5"), tmp_path / "run", **options)
    result = train(run, quiet=True)
    saved = saved_state(tmp_path / "run", 3)
    tensors = {n: t for n, t in saved.items() if isinstance(t, torch.Tensor)}
    assert not any(t.dtype == torch.float8_e4m3fn for t in tensors.values())
    assert not any("scale_inv" in name or name.endswith("base.weight") for name in tensors)
    record = read_record(result.checkpoint)
    assert (record.kind, record.base, record.base_weights) == ("adapter", run.model.path, "fp8")
    # a run on the dequantised base is another run
    other = make_run(fp8_folder("5"), tmp_path / "run", train={"steps": 4})
    with pytest.raises(ConfigError, match=r"model\.base_weights"):
        train(other, quiet=True)


@pytest.fixture(scope="module")
def stopped(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps that was stopped after two; to be copied."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        out = tmp_path_factory.mktemp("stopped") / "run"
        interrupted(make_run(tiny_folder("5"), out), 2, monkeypatch)
    return out


@pytest.fixture
def copied(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"optimizer": {"lr": 1e-3}}, ["optimizer.lr"]),
        (
            {"train": {"seed": 1, "global_batch_size": 1}, "lora": {"rank": 3}},
            ["lora.rank", "train.global_batch_size", "train.seed"],
        ),
        ({"lora": None}, ["lora.alpha", "lora.rank", "lora.targets"]),
    ],
)
def test_other_settings_are_refused_by_name(
    tiny_folder: TinyFolder, copied: Path, changed: dict[str, Any], named: list[str]
) -> None:
    before = sorted(copied.rglob("*"))
    with pytest.raises(ConfigError, match="differs from the one") as caught:
        train(make_run(tiny_folder("5"), copied, **changed), quiet=True)
    for name in named:
        assert name in str(caught.value)
    assert sorted(copied.rglob("*")) == before


def test_never_means_a_new_folder(tiny_folder: TinyFolder, copied: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps \[2\]"):
        train(make_run(tiny_folder("5"), copied, train={"resume": "never"}), quiet=True)


def test_a_finished_run_is_said_to_be_and_may_be_extended(
    tiny_folder: TinyFolder, copied: Path
) -> None:
    folder = tiny_folder("5")
    must = {"resume": "must"}
    assert train(make_run(folder, copied, train=must), quiet=True).step == 6
    with pytest.raises(ConfigError, match=r"(?s)finished already.*raise train.steps"):
        train(make_run(folder, copied), quiet=True)
    assert train(make_run(folder, copied, train={"steps": 7}), quiet=True).step == 7
    assert [line["step"] for line in read_metrics(copied)] == list(range(1, 8))


def test_a_save_that_dies_leaves_the_one_before(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("5")
    every_two = {"save_every": 2}
    train(make_run(folder, tmp_path / "whole", train=every_two), quiet=True)
    run = make_run(folder, tmp_path / "run", train=every_two)
    with monkeypatch.context() as patch:
        patch.setattr(state_module, "save_sharded", dying_save(state_module.save_sharded, at=2))
        with pytest.raises(OSError, match="disk full"):
            train(run, quiet=True)
    checkpoints = tmp_path / "run" / STEPS_FOLDER
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    assert train(run, quiet=True).step == 6
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def dying_save(save: Callable[..., None], at: int) -> Callable[..., None]:
    """`save_sharded` whose call number `at` fails half-way."""
    calls: list[Path] = []

    def save_or_die(folder: Path, state: dict[str, Any]) -> None:
        calls.append(folder)
        if len(calls) == at:
            (folder / "__0_0.distcp").write_bytes(b"half a tensor")
            raise OSError("disk full")
        save(folder, state)

    return save_or_die


def test_what_a_killed_save_leaves_behind_is_no_checkpoint(
    tiny_folder: TinyFolder, copied: Path
) -> None:
    checkpoints = copied / STEPS_FOLDER
    newest = checkpoints / "step-00000002"
    shutil.copytree(newest, checkpoints / ".step-00000005.partial-0badf00d")
    (checkpoints / "step-00000005.txt").write_text("not one, either")
    assert saved_steps(copied) == [2]
    assert train(make_run(tiny_folder("5"), copied), quiet=True).step == 6


@pytest.mark.parametrize("damage", ["shard", "index", "no shard", "no record"])
def test_a_damaged_checkpoint_is_not_resumed(
    tiny_folder: TinyFolder, copied: Path, damage: str
) -> None:
    mcore = copied / STEPS_FOLDER / "step-00000002" / "mcore"
    shard = mcore / "__0_0.distcp"
    if damage == "shard":
        shard.write_bytes(shard.read_bytes()[:2000])
    elif damage == "no shard":
        shard.unlink()
    elif damage == "index":
        (mcore / ".metadata").write_bytes((mcore / ".metadata").read_bytes()[:2000])
    else:
        (mcore.parent / "glm5.json").unlink()
    with pytest.raises(CheckpointError, match=str(mcore.parent)):
        train(make_run(tiny_folder("5"), copied), quiet=True)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("model-00002-of-00006.safetensors", "base weights"),
        ("config.json", "config.json"),
        ("chat_template.jinja", "chat template"),
        ("data/train.jsonl", "data.train"),
    ],
)
def test_changed_files_are_not_resumed_on(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    what: str,
) -> None:
    folder = Path(shutil.copytree(tiny_folder("5"), tmp_path / "hf"))
    run = make_run(folder, tmp_path / "run")
    interrupted(run, 1, monkeypatch)
    content = bytearray((folder / file).read_bytes())
    content[-2] ^= 1
    (folder / file).write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=f"(?s)files changed.*{what}"):
        train(run, quiet=True)
