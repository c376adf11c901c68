"""The whole job, shortened: checkpoint, parity, training, adapter, and transformers + peft."""

import json
from pathlib import Path

import pytest

from glm5.checkpoint.ckpt_dir import saved_steps
from glm5.cli import demo
from glm5.train.metrics import read_metrics

STEPS = 12


def test_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_STEPS", STEPS)
    folder = tmp_path / "demo"
    assert demo.run_demo(folder, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    base, learning, adapter = report["checks"]
    assert base["ok"] and float(base["figure"]) <= 1e-4
    assert adapter["ok"] and float(adapter["figure"]) <= 1e-4
    assert learning["ok"] and "held-out" in learning["figure"]
    lines = read_metrics(folder / "run")
    assert len(lines) == STEPS and lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert saved_steps(folder / "run") == [STEPS]
    assert (folder / "adapter" / "adapter_config.json").is_file()
    assert Path(report["loss curve"]).read_bytes().startswith(b"\x89PNG")
