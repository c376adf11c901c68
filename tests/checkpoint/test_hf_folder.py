"""A path or a repository becomes a folder, or an error that says which of both was tried."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from glm5.checkpoint.hf_folder import hf_folder
from glm5.errors import CheckpointError


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hf_folder(tmp_path) == tmp_path
    assert hf_folder(str(tmp_path)) == tmp_path


def test_a_repository_is_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hf_folder("owner/name") == tmp_path
    ((repo, patterns),) = asked
    assert repo == "owner/name"
    assert "*.safetensors" in patterns and not any("bin" in p or "pt" in p for p in patterns)


@pytest.mark.parametrize("name", ["owner/not-in-the-cache", "./no/such/folder", "a b"])
def test_neither_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint") as caught:
        hf_folder(name)
    assert caught.value.got == name
