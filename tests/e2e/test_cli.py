"""The installed command, as a shell starts it: its streams carry what glm5 says and no more."""

import json
import os
import subprocess
import sys
from pathlib import Path

from glm5.checkpoint.ckpt_dir import read_record
from tests.e2e.processes import ROOT
from tests.tiny_models import TinyFolder


def test_nothing_but_the_result_is_printed(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "glm5", "convert", tiny_folder("5"), tmp_path / "ckpt", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["checkpoint"] == str(tmp_path / "ckpt")
    # Megatron-Core and torch report what is not installed whenever they are imported
    assert result.stderr == ""
    assert read_record(tmp_path / "ckpt").kind == "model"
