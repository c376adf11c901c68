"""A run of reinforcement learning is the same in every layout, and so is what the engine gets."""

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.checkpoint.adapter_io import read_adapter
from glm5.config import Glm5Config
from glm5.errors import EngineError
from glm5.rl.run import train_rl
from glm5.rl.run_config import RlConfig
from glm5.rl.sync import SYNC_FOLDER
from glm5.train.metrics import read_metrics
from tests.parallel.processes import run_ranks
from tests.rl.running import FakeEngine, dies_in_call, rl_tables, without_times
from tests.tiny_models import TinyFolder

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "etp2": (2, {"etp": 2}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2pp2ep2": (4, {"tp": 2, "pp": 2, "ep": 2}),
}
STEPS = 3


def sections(**layout: int) -> dict[str, Any]:
    return {
        "lora": {
            "rank": 2,
            "alpha": 4.0,
            "expert_lora": "shared_outer",
            "train": ["norms", "router", "embeddings", "lm_head"],
        },
        # with a small eps Adam turns the sign of a gradient that is zero but for rounding into a
        # whole step
        "optimizer": {"eps": 1e-3},
        "train": {"steps": STEPS},
        "rl": {"replay": "both", "updates": 2, "is_high": 2.0},
        "layout": layout,
    }


def work(tables: dict[str, Any]) -> str:
    return str(train_rl(RlConfig.from_dict(tables, source="the test"), quiet=True).checkpoint)


@pytest.fixture(scope="module")
def one(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    work(rl_tables(tiny_folder("5.2"), out, **sections()))
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree(tiny_folder: TinyFolder, tmp_path: Path, one: Path, name: str) -> None:
    count, layout = LAYOUTS[name]
    out = tmp_path / "run"
    run_ranks(
        tmp_path / "results", count, work, rl_tables(tiny_folder("5.2"), out, **sections(**layout))
    )
    lines, expected = (without_times(read_metrics(folder)) for folder in (out, one))
    assert len(lines) == STEPS
    for line, peer in zip(lines, expected, strict=True):
        # sampling is one process's, and rounding has not changed a token
        assert line["reward"] == pytest.approx(peer["reward"], abs=1e-12)
        assert line["gap_abs_diff"] < 1e-5
        for key in ("loss", "grad_norm", "policy_entropy", "policy_ratio"):
            assert line[key] == pytest.approx(peer[key], rel=1e-3, abs=1e-6), key
        for key in ("trained_tokens", "gap_num_tokens", "gap_routing_overlap", "gap_topk_overlap"):
            assert line[key] == peer[key], key
    assert_same_adapter(Glm5Config.from_hf(tiny_folder("5.2")), out, one)


def assert_same_adapter(glm5: Glm5Config, got: Path, expected: Path) -> None:
    """What the engine got before the last step."""
    found, peer = (
        read_adapter(folder / SYNC_FOLDER / f"version-{STEPS - 1:08d}", glm5)
        for folder in (got, expected)
    )
    assert set(found.factors) == set(peer.factors) and set(found.modules) == set(peer.modules)
    assert any(bool(pair.b.any()) for pair in peer.factors.values())
    for path, pair in peer.factors.items():
        delta, reference = (p.scale * p.b @ p.a for p in (found.factors[path], pair))
        assert_near(delta, reference, path)
    for name, tensor in peer.modules.items():
        assert_near(found.modules[name], tensor, name)


def assert_near(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert got.shape == expected.shape, name
    error = torch.linalg.vector_norm(got - expected)
    assert error <= 1e-4 * max(1e-3, float(torch.linalg.vector_norm(expected))), name


def work_with_dead_engine(tables: dict[str, Any]) -> str:
    engine = FakeEngine(change=dies_in_call(2))
    try:
        train_rl(RlConfig.from_dict(tables, source="the test"), engine=engine, quiet=True)
    except EngineError as error:
        return str(error)
    return "no error"


def test_every_rank_hears_that_the_engine_died(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tables = rl_tables(tiny_folder("5"), tmp_path / "run")
    found = run_ranks(tmp_path / "results", 2, work_with_dead_engine, tables)
    assert found == ["the server is gone"] * 2
