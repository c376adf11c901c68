"""`glm5 demo` takes only what is free or its own; tests/e2e runs the whole of it."""

from pathlib import Path

import pytest

from glm5.cli.demo import Check, take_demo_folder
from glm5.errors import ConfigError
from tests.cli.conftest import Glm5


def test_a_folder_of_somebody_else_is_left_alone(glm5: Glm5, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = glm5("demo", tmp_path)
    assert result.exit_code == 2 and "not a demo" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_its_own_folder_is_made_anew(tmp_path: Path) -> None:
    take_demo_folder(tmp_path / "demo")
    (tmp_path / "demo" / "hf").mkdir()
    (tmp_path / "demo" / ".adapter.partial-1").mkdir()
    take_demo_folder(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".glm5-demo"]
    (tmp_path / "demo" / ".env").touch()
    with pytest.raises(ConfigError, match=r"not a demo(?s:.*)\.env"):
        take_demo_folder(tmp_path / "demo")
    (tmp_path / "demo" / ".env").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "demo")
    take_demo_folder(tmp_path / "link")
    (tmp_path / "demo" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"not a demo(?s:.*)notes\.txt"):
        take_demo_folder(tmp_path / "demo")
    assert (tmp_path / "demo" / "notes.txt").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a demo"):
        take_demo_folder(tmp_path / "file")


def test_a_failed_check_is_1(glm5: Glm5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "read_metrics", "plot_loss"):
        monkeypatch.setattr(f"glm5.cli.demo.{name}", lambda *args, **kw: tmp_path / "loss.png")
    monkeypatch.setattr("glm5.cli.demo._verify", lambda *args: Check("logits", "1e-6", True))
    monkeypatch.setattr("glm5.cli.demo.export_adapter", lambda *args: [])
    for learned, code in ((True, 0), (False, 1)):
        check = Check("loss", "8 -> 9", learned)
        monkeypatch.setattr("glm5.cli.demo._check_learning", lambda metrics, check=check: check)
        assert glm5("demo", tmp_path / "demo", "--json").exit_code == code
