"""The run file: defaults, overrides, and an error for everything that cannot be right."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.checkpoint.ckpt_dir import LoraRecord
from glm5.errors import ConfigError
from glm5.lora.spec import PairSpec
from glm5.train.overrides import flatten, merge_tables, parse_override
from glm5.train.resume import lora_record
from glm5.train.run_config import RunConfig
from glm5.train.run_errors import known_names
from glm5.train.sections import ATTENTION_TARGETS, MLP_TARGETS
from glm5.train.template import RESERVED_ARGS

MINIMAL = """
[model]
path = "zai-org/GLM-5.2"
[data]
train = "train.jsonl"
seq_length = 64
[optimizer]
lr = 1e-4
[train]
steps = 10
global_batch_size = 4
[output]
dir = "out"
"""
LORA = f"{MINIMAL}\n[lora]\nrank = 8\n"


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def failure(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_toml(path, overrides)
    return str(caught.value)


def test_minimal_file_gets_the_defaults(tmp_path: Path) -> None:
    run = RunConfig.from_toml(write(tmp_path))
    assert run.model.dtype == "bfloat16"
    assert run.model.recompute == "none"
    assert run.lora is None
    assert run.data.eval is None
    assert run.train.micro_batch_size == 1
    assert run.train.resume == "auto"


def test_lora_table_alone_targets_attention_and_mlp(tmp_path: Path) -> None:
    run = RunConfig.from_toml(write(tmp_path, f"{MINIMAL}\n[lora]\n"))
    assert run.lora is not None
    assert run.lora.targets == ATTENTION_TARGETS + MLP_TARGETS


def test_every_lora_option_is_recorded_and_read_again(tmp_path: Path) -> None:
    text = f"""{MINIMAL}
[lora]
targets = ["o_proj", "up_proj"]
expert_lora = "shared_outer"
dropout = 0.1
use_rslora = true
rank_pattern = {{ 'experts\\.\\d+\\.up_proj' = 4 }}
alpha_pattern = {{ o_proj = 8 }}
exclude = ["layers.0.self_attn.o_proj"]
train = ["router"]
"""
    run = RunConfig.from_toml(write(tmp_path, text))
    assert run.lora is not None
    assert RunConfig.from_dict(run.to_toml_dict(), source="a checkpoint").lora == run.lora
    record = lora_record(run.lora)
    assert LoraRecord.model_validate_json(record.model_dump_json()) == record
    spec = record.spec()
    assert spec.pair("model.layers.3.mlp.experts.7.up_proj") == PairSpec(4, 32 / 4**0.5)
    assert spec.pair("model.layers.3.self_attn.o_proj") == PairSpec(16, 8 / 16**0.5)
    assert (spec.dropout, spec.expert_lora) == (0.1, "shared_outer")
    assert (spec.exclude, record.train) == (("layers.0.self_attn.o_proj",), ["router"])
    one = RunConfig.from_toml(write(tmp_path, text), ["lora.exclude='.*[.]o_proj'"]).lora
    assert one is not None
    assert lora_record(one).spec().exclude == ".*[.]o_proj"


def test_paths_of_the_file_start_at_its_folder(tmp_path: Path) -> None:
    run = RunConfig.from_toml(write(tmp_path))
    assert run.data.train == (tmp_path / "train.jsonl",)
    assert run.output.dir == tmp_path / "out"


def test_paths_of_overrides_start_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path = write(tmp_path / "recipes")
    run = RunConfig.from_toml(path, ["output.dir=../o", "data.train=['a.jsonl', '/b.parquet']"])
    assert run.output.dir == tmp_path / "o"
    assert run.data.train == (here / "a.jsonl", Path("/b.parquet"))


def test_model_path_is_a_folder_only_where_there_is_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert RunConfig.from_toml(path).model.path == "zai-org/GLM-5.2"
    (tmp_path / "zai-org" / "GLM-5.2").mkdir(parents=True)
    assert RunConfig.from_toml(path).model.path == str(tmp_path / "zai-org" / "GLM-5.2")
    dotted = write(tmp_path, MINIMAL.replace("zai-org/GLM-5.2", "../absent"))
    assert RunConfig.from_toml(dotted).model.path == str(tmp_path.parent / "absent")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=3e-5", {"optimizer": {"lr": 3e-5}}),
        ("data.shuffle = false", {"data": {"shuffle": False}}),
        ("model.path=tiny/model", {"model": {"path": "tiny/model"}}),
        ('model.path="a=b"', {"model": {"path": "a=b"}}),
        ("model.path=a=b", {"model": {"path": "a=b"}}),
        ("lora.targets=['o_proj']", {"lora": {"targets": ["o_proj"]}}),
        ("lora={rank = 4}", {"lora": {"rank": 4}}),
        ("a=", {"a": ""}),
        ("a=1\nb=2", {"a": "1\nb=2"}),
    ],
)
def test_parse_override(text: str, expected: dict[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["", "optimizer.lr", "=1", "a..b=1", ".a=1", "a.=1"])
def test_malformed_override_raises(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_override(text)


def test_merge_changes_neither_table() -> None:
    base, update = {"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4}
    assert merge_tables(base, update) == {"a": {"x": 1, "y": 3}, "b": 4}
    assert base == {"a": {"x": 1, "y": 2}}
    assert update == {"a": {"y": 3}, "b": 4}


def test_later_overrides_win_and_make_tables(tmp_path: Path) -> None:
    run = RunConfig.from_toml(write(tmp_path), ["lora.rank=4", "lora.rank=2", "optimizer.lr=1"])
    assert run.lora is not None
    assert run.lora.rank == 2
    assert run.optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("data.seq_lenght=3", "data.seq_lenght (from --set): unknown key; the nearest known name "
         "is data.seq_length"),
        ("trian.seed=3", "trian (from --set): unknown key; the nearest known name is train"),
        ("train.lr=3", "train.lr (from --set): unknown key; the nearest known name is "
         "optimizer.lr"),
        ("lora.doropout=0.1", "lora.doropout (from --set): unknown key; the nearest known name is"),
        ("lr=0.1", "lr (from --set): unknown key; the nearest known name is optimizer.lr"),
        ("train.warmup_step=1", "nearest known name is optimizer.warmup_steps"),
    ],
)  # fmt: skip
def test_unknown_key_tells_the_nearest_name(tmp_path: Path, override: str, hint: str) -> None:
    path = write(tmp_path)
    message = failure(path, override)
    assert str(path) in message
    assert hint in message


def test_every_problem_is_listed_with_name_got_and_expected(tmp_path: Path) -> None:
    text = MINIMAL.replace("lr = 1e-4", 'lr = "fast"\nbeta1 = 1.0').replace("steps = 10", "")
    message = failure(write(tmp_path, text), "train.global_batch_size=true")
    assert "4 problems" in message
    assert "optimizer.lr: got 'fast', expected a valid number" in message
    assert "optimizer.beta1: got 1.0, expected less than 1" in message
    assert "train.steps: missing" in message
    assert "train.global_batch_size (from --set): got True, expected a valid integer" in message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.dtype=float16", "'float32' or 'bfloat16'; did you mean bfloat16?"),
        ("model.base_weights=int8", "'dtype' or 'fp8'"),
        ("model.fp8_compute=true", "fp8_compute without base_weights 'fp8' changes nothing"),
        ("model.fp8_transient_mib=64", "fp8_transient_mib without base_weights 'fp8' changes"),
        ("model.base_weights=fp8", "'fp8' never trains, and without [lora] every weight does"),
        ("model={path='x', base_weights='fp8', fp8_transient_mib=0}", "greater than or equal to 1"),
        ("model.path=''", "a string that is not empty"),
        ("model.path.x=1", "got {'x': 1}, expected a valid string"),
        ("model=3", "got 3, expected a table"),
        ("model.latent_norm_eps=0.0", "greater than 0"),
        ("data.train=[]", "a list that is not empty"),
        ("data.train=3", "got 3, expected a list"),
        ("data.train=['a.jsonl', 3]", "data.train.1 (from --set): got 3, expected a path"),
        ("data.train=''", "expected a path"),
        ("output.dir=''", "expected a path"),
        ("data.seq_length=1", "greater than or equal to 2"),
        ("data.seq_length=64.0", "a valid integer"),
        ("lora.targets=['o_porj']", "did you mean o_proj?"),
        ("lora.targets=o_proj", "got 'o_proj', expected a list"),
        ("lora.targets=['o_proj', 'o_proj']", "o_proj more than once"),
        ("lora.rank=0", "greater than or equal to 1"),
        ("lora.dropout=1.0", "less than 1"),
        ("lora.dropout=0.1", "dropout 0.1 cannot be computed for kv_b_proj"),
        ("lora.expert_lora=shared", "did you mean shared_outer?"),
        ("lora={targets=['o_proj'], expert_lora='none'}", "expert_lora none does nothing"),
        ("lora.rank_pattern={o_proj=0}", "greater than or equal to 1"),
        ("lora.rank_pattern={'(o'=1}", "'(o'"),
        ("lora.alpha_pattern={o_proj=0}", "greater than 0"),
        ("lora.exclude='(o'", "'(o'"),
        ("lora.exclude=3", "lora.exclude (from --set): got 3, expected a list of names or one"),
        ("lora.exclude=['']", "got [''], expected a list of names"),
        ("lora.train=['router', 'router']", "train names router more than once"),
        ("lora.train=router", "got 'router', expected a list"),
        ("optimizer.lr=nan", "finite number"),
        ("optimizer.lr=0", "greater than 0"),
        ("optimizer.min_lr=1", "min_lr 1.0 is above lr 0.0001"),
        ("train.micro_batch_size=3", "4 is not a multiple of micro_batch_size 3"),
        ("optimizer.warmup_steps=10", "warmup_steps 10 is not below train.steps 10"),
        ("train.eval_every=1", "needs data.eval"),
        ("train.resume=yes", "'auto', 'never' or 'must'"),
        ("train.seed=-1", "greater than or equal to 0"),
        ("train.seed=4294967296", "less than 4294967296"),
        ("train.steps=100000000", "less than 100000000"),
        ("train.steps=" + "[" * 5000, "expected a valid integer"),
        ("layout.layers_per_stage=[]", "a list that is not empty"),
        (
            "layout.layers_per_stage=[3, 0]",
            "layers_per_stage.1 (from --set): got 0, expected great",
        ),
        ("data.chat_template_args.day=1979-05-27", "a string, a number, a boolean, a list or"),
        ("output.dir=~nosuchuser/x", "no path can be made of this"),
        ('output.dir="a\\u0000b"', "no path can be made of this"),
    ],
)
def test_wrong_value_is_refused(tmp_path: Path, override: str, reason: str) -> None:
    assert reason in failure(write(tmp_path), override)


def test_values_at_the_bounds_are_good(tmp_path: Path) -> None:
    overrides = [
        "optimizer.warmup_steps=9",
        "optimizer.min_lr=1e-4",
        "train.micro_batch_size=4",
        "data.seq_length=2",
        "lora.rank=1",
    ]
    assert RunConfig.from_toml(write(tmp_path), overrides).optimizer.warmup_steps == 9


def test_arguments_of_transformers_are_no_template_variables(tmp_path: Path) -> None:
    message = failure(
        write(tmp_path), "data.chat_template_args={max_length = 8, enable_thinking = false}"
    )
    assert "data (from --set): chat_template_args has max_length, which transformers" in message
    assert "enable_thinking" not in message


def test_every_argument_of_transformers_is_reserved() -> None:
    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {*parameters} - {"self", "kwargs"} <= {*RESERVED_ARGS}


def test_min_lr_of_a_constant_schedule_would_do_nothing(tmp_path: Path) -> None:
    overrides = ["optimizer.schedule=constant", "optimizer.min_lr=1e-5"]
    assert "does nothing" in failure(write(tmp_path), *overrides)


def test_indexer_loss_follows_what_trains(tmp_path: Path) -> None:
    full, lora = write(tmp_path), tmp_path / "lora.toml"
    lora.write_text(LORA, encoding="utf-8")
    assert RunConfig.from_toml(full).indexer_loss_coeff == 0.001
    assert RunConfig.from_toml(full, ["train.indexer_loss_coeff=0"]).indexer_loss_coeff == 0
    assert RunConfig.from_toml(lora).indexer_loss_coeff == 0
    assert RunConfig.from_toml(lora, ["train.indexer_loss_coeff=0"]).indexer_loss_coeff == 0
    with_indexer = ["lora.targets=['o_proj', 'wk']"]
    assert RunConfig.from_toml(lora, with_indexer).indexer_loss_coeff == 0.001


def test_indexer_loss_without_a_trained_indexer_is_refused(tmp_path: Path) -> None:
    message = failure(write(tmp_path, LORA), "train.indexer_loss_coeff=0.1")
    assert "needs a trained indexer" in message


def test_indexer_adapters_without_their_loss_are_refused(tmp_path: Path) -> None:
    overrides = ["lora.targets=['wq_b']", "train.indexer_loss_coeff=0"]
    assert "untrained" in failure(write(tmp_path, LORA), *overrides)


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    assert "cannot read" in failure(tmp_path / "absent.toml")
    assert "cannot read" in failure(tmp_path)
    assert "not valid TOML" in failure(write(tmp_path, "[model\n"))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    assert "not UTF-8" in failure(tmp_path / "latin.toml")


def test_recorded_run_reads_back_equal(tmp_path: Path) -> None:
    import json

    args = "data.chat_template_args={clear_thinking = false}"
    run = RunConfig.from_toml(write(tmp_path, LORA), [args])
    tables = json.loads(json.dumps(run.to_toml_dict(), allow_nan=False))
    back = RunConfig.from_dict(tables, source="checkpoint")
    assert back.differences(run) == []
    assert back.to_toml_dict() == run.to_toml_dict()
    assert back.data == run.data


def test_differences_name_what_must_not_change(tmp_path: Path) -> None:
    path = write(tmp_path, LORA)
    run = RunConfig.from_toml(path)
    changed = ["optimizer.lr=1", "lora.rank=4", "data.max_samples=3", "train.seed=1"]
    other = RunConfig.from_toml(path, changed)
    expected = ["data.max_samples", "lora.rank", "optimizer.lr", "train.seed"]
    assert run.differences(other) == expected
    assert other.differences(run) == expected


def test_full_and_lora_runs_differ(tmp_path: Path) -> None:
    full = RunConfig.from_toml(write(tmp_path))
    lora = RunConfig.from_toml(write(tmp_path, LORA))
    assert "lora.rank" in full.differences(lora)


def test_differences_leave_out_what_may_change(tmp_path: Path) -> None:
    path = write(tmp_path)
    run = RunConfig.from_toml(path)
    free = {
        "train.steps": "11",
        "train.eval_every": "0",
        "train.save_every": "5",
        "train.keep": "7",
        "train.log_every": "3",
        "train.timeout_minutes": "5",
        "train.resume": "must",
        "layout.tp": "2",
        "layout.pp": "3",
        "layout.cp": "4",
        "layout.ep": "5",
        "layout.etp": "6",
        "layout.vpp": "7",
        "layout.attention_parallel": "heads",
        "layout.layers_per_stage": "[3, 2, 2]",
        "output.dir": "elsewhere",
        "output.tensorboard": "true",
    }
    assert set(free) == set(RunConfig.free_on_resume)
    other = RunConfig.from_toml(path, [f"{key}={value}" for key, value in free.items()])
    assert other != run
    assert run.differences(other) == []


def test_free_names_exist() -> None:
    assert set(RunConfig.free_on_resume) <= set(known_names(RunConfig))


def test_every_field_is_described() -> None:
    for name, section in RunConfig.model_fields.items():
        for model in (section.annotation, *getattr(section.annotation, "__args__", ())):
            for key, field in getattr(model, "model_fields", {}).items():
                assert field.description, f"{name}.{key}"


def test_flatten_keeps_empty_tables() -> None:
    assert dict(flatten({"a": {"b": {}, "c": 1}})) == {"a.b": {}, "a.c": 1}


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, glm5.train.run_config; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=_env()).returncode == 0


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def is_rl(path: Path) -> bool:
    return "[rl]" in path.read_text()


RECIPES = (Path(__file__).parents[2] / "recipes").glob("*.toml")


@pytest.mark.parametrize("path", sorted(path for path in RECIPES if not is_rl(path)))
def test_recipes_are_good(path: Path) -> None:
    run = RunConfig.from_toml(path)
    # without adapters the indexer trains, too
    assert run.indexer_loss_coeff == (0 if run.lora else 0.001)
