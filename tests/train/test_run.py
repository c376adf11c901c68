"""A run from its file to its checkpoints, and everything that must stop it before the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from glm5.checkpoint.ckpt_dir import HF_FOLDER, read_record, saved_steps, step_folder
from glm5.config import Glm5Config
from glm5.errors import AdapterError, CheckpointError, ConfigError, DataError, LayoutError
from glm5.train.chat import check_fits_model
from glm5.train.metrics import read_metrics
from glm5.train.packing import PackedDataset
from glm5.train.resume import find_resume_step
from glm5.train.run import describe_data, train
from glm5.train.trainable import build_trainable, describe_model
from tests.hf_folders import rewrite
from tests.tiny_models import TinyFolder
from tests.training import all_finite, run_config, write_few_chats


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if the run gets as far as its model."""

    def built(*args: Any) -> None:
        pytest.fail("the model was built")

    monkeypatch.setattr("glm5.train.session.build_trainable", built)


def test_what_the_run_says_of_the_model_reaches_it(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5")
    for wanted in (False, True):
        run = run_config(folder, tmp_path, model={"deterministic_attention": wanted})
        (model,) = build_trainable(run, folder)
        assert model.config.deterministic_attention is wanted


@pytest.mark.usefixtures("no_model")
def test_a_wrong_layout_is_told_before_data_are_read(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("no JSON\n")
    run = run_config(
        tiny_folder("5"),
        tmp_path / "run",
        data={"train": str(data)},
        layout={"layers_per_stage": [2]},
    )
    with pytest.raises(LayoutError, match="layers per stage"):
        train(run, quiet=True)


@pytest.mark.parametrize("lora", [True, False])
def test_the_loss_falls(tiny_folder: TinyFolder, tmp_path: Path, lora: bool) -> None:
    folder = tiny_folder("5")
    run = run_config(
        folder,
        tmp_path / "run",
        # rows that are seen again and again
        data={"max_samples": 8, "eval": write_few_chats(folder, tmp_path / "eval.jsonl")},
        optimizer={"lr": 2e-2 if lora else 2e-3},
        train={"steps": 12},
        **({"lora": {"rank": 8, "alpha": 16.0}} if lora else {"lora": None}),
    )
    said: list[str] = []
    result = train(run, say=said.append, quiet=True)
    assert (result.step, result.stopped_by) == (12, None)
    assert result.checkpoint == step_folder(tmp_path / "run", 12)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all_finite(lines, "loss") and all_finite(lines, "grad_norm")
    first, last = (sum(line["loss"] for line in part) for part in (lines[:3], lines[-3:]))
    assert last < 0.7 * first
    assert "eval_loss" in lines[-1]
    assert said[0].startswith("train: ") and said[1].startswith("eval: ")
    record = read_record(result.checkpoint)
    assert record.kind == ("adapter" if lora else "model")
    assert record.base == (str(folder) if lora else None)
    assert record.run == run.to_toml_dict()
    assert record.step == 12
    assert (result.checkpoint / HF_FOLDER / "chat_template.jinja").is_file()
    partial = [path for path in (tmp_path / "run").rglob("*") if "partial" in path.name]
    assert partial == []


def test_old_checkpoints_go(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    train(run_config(tiny_folder("5"), tmp_path, train={"save_every": 1, "keep": 2}), quiet=True)
    assert saved_steps(tmp_path) == [3, 4]


def test_the_latent_eps_of_the_run_is_recorded(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    run = run_config(
        tiny_folder("5"), tmp_path, model={"latent_norm_eps": 1e-2}, train={"steps": 1}
    )
    result = train(run, quiet=True)
    assert Glm5Config.from_hf_dict(read_record(result.checkpoint).config).latent_norm_eps == 1e-2


def test_bad_data_is_told_with_its_place_before_the_model_is_built(
    tiny_folder: TinyFolder, tmp_path: Path, no_model: None
) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = tmp_path / "chats.jsonl"
    data.write_text(f"{json.dumps(good)}\n{{}}\n{json.dumps(good)}\nnot json\n")
    run = run_config(tiny_folder("5"), tmp_path / "run", data={"train": str(data)})
    with pytest.raises(DataError) as caught:
        train(run, quiet=True)
    assert f"{data}:2: no messages" in str(caught.value)
    assert f"{data}:4: invalid JSON" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_chat_that_is_too_long_is_told_or_counted(
    tiny_folder: TinyFolder, tmp_path: Path, no_model: None
) -> None:
    run = run_config(tiny_folder("5"), tmp_path, data={"seq_length": 20})
    with pytest.raises(DataError, match=r"train.jsonl:\d+: \d+ tokens, more than seq_length 20"):
        train(run, quiet=True)


def test_targets_that_match_nothing_are_refused(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5.lora.targets._matches", lambda *args: iter(()))
    with pytest.raises(AdapterError, match="matches no linear"):
        train(run_config(tiny_folder("5"), tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_nothing_to_resume(tiny_folder: TinyFolder, tmp_path: Path, no_model: None) -> None:
    run = run_config(tiny_folder("5"), tmp_path / "run", train={"resume": "must"})
    with pytest.raises(ConfigError, match="nothing to resume"):
        train(run, quiet=True)
    assert find_resume_step(run_config(tiny_folder("5"), tmp_path / "run")) == 0


def test_what_is_said_of_data_counts_cuts_and_skips(tiny_folder: TinyFolder) -> None:
    class Data(PackedDataset):
        def __init__(self, truncated: int, skipped: int) -> None:
            self.seq_length, self.num_truncated, self.num_skipped = 10, truncated, skipped

        def __len__(self) -> int:
            return 2

        num_tokens = 1500  # type: ignore[assignment]
        fill = 0.75  # type: ignore[assignment]

    assert describe_data("train", Data(0, 0)) == "train: 2 rows, 1,500 tokens, 75% full"
    assert describe_data("train", Data(1, 2)).endswith("; 1 chats truncated, 2 skipped")


def test_what_is_said_of_the_model_counts_what_trains(tiny_folder: TinyFolder) -> None:
    from torch import nn

    model = nn.Sequential(nn.Linear(10, 100, bias=False), nn.Linear(3, 5))
    model[0].requires_grad_(False)
    assert describe_model([model]) == "model: 1,020 parameters, 20 of them train, on cpu"


def test_a_tokenizer_with_more_ids_than_the_model(
    tiny_folder: TinyFolder, tmp_path: Path, no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smaller(chats: Any, **limits: int) -> None:
        check_fits_model(chats, **limits | {"vocab_size": 100})

    monkeypatch.setattr("glm5.train.run.check_fits_model", smaller)
    with pytest.raises(DataError, match=r"(?s)train\.jsonl:1.*ids below vocab_size = 100"):
        train(run_config(tiny_folder("5"), tmp_path / "run"), quiet=True)


def test_a_chat_beyond_the_models_positions(
    tiny_folder: TinyFolder, tmp_path: Path, no_model: None
) -> None:
    folder = rewrite(tiny_folder("5"), tmp_path / "hf", lambda t: None, max_position_embeddings=20)
    with pytest.raises(DataError, match=r"(?s)longer than.*max_position_embeddings = 20"):
        train(run_config(folder, tmp_path / "run"), quiet=True)
    cut = {"seq_length": 20, "too_long": "truncate"}
    # past the check of the data, where this test has no model
    with pytest.raises(pytest.fail.Exception):
        train(run_config(folder, tmp_path / "run", data=cut), quiet=True)


def test_a_router_that_bf16_cannot_hold_is_not_rounded(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.gate.weight"
        tensors[name] = tensors[name].float() + 1e-4

    folder = rewrite(tiny_folder("5", dtype="bfloat16"), tmp_path / "hf", widen)
    run = run_config(folder, tmp_path / "run", model={"dtype": "bfloat16"})
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight(?s:.*)would be rounded"):
        train(run, quiet=True)
