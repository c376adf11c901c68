"""The command line in this process; tests/e2e runs it in processes of its own."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from glm5.cli import main
from tests.tiny_models import tiny_folder

__all__ = ["tiny_folder"]


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Glm5 = Callable[..., Result]


@pytest.fixture
def glm5(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Glm5:
    """glm5("tiny", folder, ...) runs the command and returns its Result."""
    # models of other tests live on the process group that a command ends
    monkeypatch.setattr("glm5.cli.process._shut_down", lambda: None)
    monkeypatch.setattr("glm5.cli.quiet.quiet_libraries", lambda: None)
    # tables must not be cut
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["glm5", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        printed = capsys.readouterr()
        return Result(code if isinstance(code, int) else 0, printed.out, printed.err)

    return invoke
