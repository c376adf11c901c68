"""`glm5 convert-adapter` between PEFT, SGLang and vLLM, on the settings of a model alone."""

import json
from pathlib import Path

import pytest

from glm5.checkpoint.adapter_io import compare_adapters, read_adapter
from glm5.config import Glm5Config
from tests.adapters import adapter_of, edit_settings, edit_tensors, make_factors, write
from tests.checkpoint.test_adapter_serving import shared_outer
from tests.checkpoint.test_adapter_serving import write as write_serving
from tests.cli.conftest import Glm5
from tests.tiny_models import TinyFolder


@pytest.fixture
def config_file(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("5.2") / "config.json"


@pytest.fixture
def config(config_file: Path) -> Glm5Config:
    return Glm5Config.from_hf(config_file.parent)


def test_there_and_back(glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path) -> None:
    adapter = adapter_of(make_factors(config))
    write(tmp_path / "peft", adapter, config)
    options = ("--model", config_file, "--json")
    result = glm5(
        "convert-adapter", tmp_path / "peft", tmp_path / "sglang", "--to", "sglang", *options
    )
    assert result.exit_code == 0, result.err
    assert result.json == {
        "folder": str(tmp_path / "sglang"),
        "for": "sglang",
        "read as": "peft",
        "expert_lora": "per_expert",
        "linears": len(adapter.factors),
        "largest rank": 3,
        "largest error": 0.0,
        "linears filled with zeros": 0,
        "linears rescaled and rounded": 0,
        "serve with": "--enable-lora --max-lora-rank 3 --lora-backend triton "
        "--moe-runner-backend triton --disable-shared-experts-fusion",
    }
    result = glm5(
        "convert-adapter", tmp_path / "sglang", tmp_path / "again", "--to", "peft", *options
    )
    assert result.exit_code == 0 and result.json["read as"] == "serving"
    assert compare_adapters(read_adapter(tmp_path / "again", config), adapter)[0] == 0.0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        before, after = ((tmp_path / d / name).read_bytes() for d in ("peft", "again"))
        assert before == after, name


def test_what_vllm_would_drop(
    glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path
) -> None:
    write(tmp_path / "in", adapter_of(make_factors(config)), config)
    command = ["convert-adapter", tmp_path / "in", tmp_path / "out", "--to", "vllm"]
    command += ["--model", config_file]
    result = glm5(*command)
    assert (
        result.exit_code == 2 and "kv_b_proj" in result.err and "--without kv_b_proj" in result.err
    )
    assert not (tmp_path / "out").exists()
    left_out = ("kv_b_proj", "wk", "weights_proj")
    result = glm5(*command, *(word for name in left_out for word in ("--without", name)))
    assert result.exit_code == 0 and "--max-lora-rank 8" in result.out
    paths = read_adapter(tmp_path / "out", config).factors
    assert set(paths) == {p for p in make_factors(config) if not p.endswith(left_out)}
    result = glm5(*command[:2], tmp_path / "no", *command[3:], "--without", "k_proj")
    assert result.exit_code == 2 and "no such linears" in result.err


def test_shared_factors(glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path) -> None:
    adapter = shared_outer(make_factors(config))
    write_serving(tmp_path / "in", adapter, "sglang", config)
    command = ["convert-adapter", tmp_path / "in", "--model", config_file, "--json"]
    result = glm5(*command, tmp_path / "kept", "--to", "sglang", "--from", "sglang")
    assert result.exit_code == 0 and result.json["expert_lora"] == "shared_outer"
    assert "--experts-shared-outer-loras" in result.json["serve with"]
    result = glm5(*command, tmp_path / "expanded", "--to", "sglang", "--expert-lora", "per_expert")
    assert result.exit_code == 0 and result.json["expert_lora"] == "per_expert"
    result = glm5(*command, tmp_path / "peft", "--to", "peft")
    assert result.exit_code == 0 and result.json["expert_lora"] == "per_expert"
    for name in ("kept", "expanded", "peft"):
        assert compare_adapters(read_adapter(tmp_path / name, config), adapter)[0] == 0.0
    command[1] = tmp_path / "expanded"
    result = glm5(*command, tmp_path / "no", "--to", "sglang", "--expert-lora", "shared_outer")
    assert result.exit_code == 2 and "an approximation would be another model" in result.err
    assert not (tmp_path / "no").exists()


def test_a_source_that_is_not_what_it_is_said_to_be(
    glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path
) -> None:
    write(tmp_path / "in", adapter_of(make_factors(config)), config)
    command = ["convert-adapter", tmp_path / "in", tmp_path / "out", "--to", "sglang"]
    command += ["--model", config_file]
    result = glm5(*command, "--from", "sglang")
    assert result.exit_code == 2 and "sglang would not serve" in result.err
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    command[1] = tmp_path / "run"
    result = glm5(*command)
    assert result.exit_code == 2 and "glm5 export CKPT_DIR" in result.err
    command[1] = tmp_path / "nothing"
    assert "cannot be read" in glm5(*command).err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    command[1] = tmp_path / "in"
    assert "not an empty folder" in glm5(*command).err


@pytest.mark.parametrize("consumer", ["peft", "sglang"])
def test_zeros_are_told_of_the_source(
    consumer: str, glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, lambda path: path.endswith("o_proj"))
    write(tmp_path / "in", adapter_of(factors), config)
    edit_tensors(tmp_path / "in", lambda t: t.update({k: v * 0 for k, v in t.items()}))
    command = ["convert-adapter", tmp_path / "in", tmp_path / "out", "--to", consumer]
    result = glm5(*command, "--model", config_file)
    assert result.exit_code == 2 and f"{tmp_path / 'in'} holds zeros only" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_whose_folder_with_rslora(
    glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path
) -> None:
    factors = make_factors(config, lambda path: not path.endswith(("wk", "_proj")))
    write_serving(tmp_path / "in", adapter_of(factors), "vllm", config)
    edit_settings(tmp_path / "in", use_rslora=True)
    command = ["convert-adapter", tmp_path / "in", tmp_path / "out", "--to", "sglang"]
    command += ["--model", config_file]
    result = glm5(*command)
    assert result.exit_code == 2 and "--from vllm" in result.err
    result = glm5(*command, "--from", "sglang")
    assert result.exit_code == 2 and "sglang does not read" in result.err
    assert glm5(*command, "--from", "vllm").exit_code == 0
    read = read_adapter(tmp_path / "out", config).factors
    for path, pair in read.items():
        assert pair.scale == pytest.approx(factors[path].scale * pair.a.shape[0] ** 0.5)


def test_the_base_of_the_source_is_kept(
    glm5: Glm5, config_file: Path, config: Glm5Config, tmp_path: Path
) -> None:
    write(tmp_path / "in", adapter_of(make_factors(config)), config)
    settings = tmp_path / "in" / "adapter_config.json"
    for base, expected in (("zai-org/GLM-5.2", "zai-org/GLM-5.2"), (None, str(config_file.parent))):
        raw = json.loads(settings.read_text()) | {"base_model_name_or_path": base}
        settings.write_text(json.dumps(raw))
        out = tmp_path / f"out {base is None}"
        glm5("convert-adapter", tmp_path / "in", out, "--to", "sglang", "--model", config_file)
        raw = json.loads((out / "adapter_config.json").read_text())
        assert raw["base_model_name_or_path"] == expected
