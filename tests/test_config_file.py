"""config.json is found locally or in the Hub cache, and read strictly."""

import json
from pathlib import Path

import pytest

from glm5.config import Glm5Config
from glm5.config_file import find_config_file, read_config_file
from glm5.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "src/glm5/configs"
GLM52 = (FIXTURES / "glm52.json").read_text()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache of this test's own."""
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    return tmp_path


def write_config(folder: Path, text: str = GLM52) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(text)
    return path


def test_local_folder_as_path_and_string(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = Glm5Config.from_hf(tmp_path)
    assert config == Glm5Config.from_hf(str(tmp_path))
    assert config.hf_raw == json.loads(GLM52)


def test_hub_cache_is_read_offline(hub_cache: Path) -> None:
    repo = hub_cache / "models--some-org--some-model"
    write_config(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    assert Glm5Config.from_hf("some-org/some-model").num_hidden_layers == 78


@pytest.mark.parametrize("name", ["some-org/absent", "/no/such/folder", "./no/such/folder", ""])
def test_nothing_there(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Glm5Config.from_hf(name)
    assert "config.json" in str(caught.value)
    assert caught.value.remedy is not None


def test_folder_without_config_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no config.json in {tmp_path}"):
        find_config_file(tmp_path)


def test_a_file_is_answered_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"name its folder: {tmp_path}"):
        find_config_file(write_config(tmp_path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("{} {}", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"a": NaN}', "the number NaN is not JSON"),
        ('{"a": [-Infinity]}', "the number -Infinity is not JSON"),
        ('{"a": 1, "b": 2, "a": 1}', "key given twice: a"),
        ('{"rope_parameters": {"x": 1, "x": 2}}', "key given twice: x"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        ("[]", "a JSON list"),
        ("null", "a JSON NoneType"),
    ],
)
def test_text_that_is_no_configuration(tmp_path: Path, text: str, why: str) -> None:
    path = write_config(tmp_path, text)
    with pytest.raises(ConfigError, match=why) as caught:
        read_config_file(path)
    assert str(path) in str(caught.value)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config_file(path)


def test_a_wrong_value_is_reported_with_its_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, GLM52.replace('"hidden_size": 6144', '"hidden_size": "6144"'))
    with pytest.raises(ConfigError, match="hidden_size is not valid") as caught:
        Glm5Config.from_hf(tmp_path)
    assert str(path) in str(caught.value)
    assert caught.value.got == "'6144' (str)"
