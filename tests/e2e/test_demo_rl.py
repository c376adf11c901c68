"""Rewards alone teach a tiny model to sort, shortened: warm start, GRPO, adapter, curve."""

import json
from pathlib import Path

import pytest

from glm5.checkpoint.ckpt_dir import saved_steps
from glm5.cli import demo_rl
from glm5.train.metrics import read_metrics

WARMUP_STEPS, STEPS = 120, 16


def test_the_reward_rises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_rl, "_WARMUP_STEPS", WARMUP_STEPS)
    monkeypatch.setattr(demo_rl, "_STEPS", STEPS)
    monkeypatch.setattr(demo_rl, "_LEAST_AT_LAST", 0.3)
    folder = tmp_path / "demo"
    assert demo_rl.run_rl_demo(folder, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    first, last, gap, adapter = report["checks"]
    assert float(last["figure"]) > float(first["figure"]) + 0.15
    assert float(gap["figure"]) <= 1e-5 and float(adapter["figure"]) <= 1e-4
    lines = read_metrics(folder / "run")
    assert len(lines) == STEPS and saved_steps(folder / "run") == [STEPS]
    assert {line["gap_routing_overlap"] for line in lines} == {1.0}
    assert Path(report["reward curve"]).read_bytes().startswith(b"\x89PNG")
