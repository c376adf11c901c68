"""Reinforcement learning on frozen float8 weights: the reference is the base, the gap is none."""

from pathlib import Path

import pytest

from glm5.config import Glm5Config
from glm5.rl.engine import describe_quantised_base
from glm5.rl.run import train_rl
from glm5.train.metrics import read_metrics
from tests.rl.running import rl_config
from tests.tiny_models import TinyFolder, write_fp8


def test_a_run_on_float8_weights(fp8_folder: TinyFolder, tmp_path: Path) -> None:
    """The engine computes with the dequantised weights, which exact products are of."""
    run = rl_config(
        fp8_folder("5"),
        tmp_path / "run",
        model={"base_weights": "fp8"},
        rl={"replay": "both", "kl_coeff": 0.1},
    )
    assert train_rl(run, quiet=True).step == 3
    lines = read_metrics(tmp_path / "run")
    for line in lines:
        assert line["gap_abs_diff"] < 1e-5 and line["gap_kl"] < 1e-9
        assert line["policy_ratio"] == 1 and line["grad_norm"] > 0
    # the reference is the base without adapters, and that is where the run starts
    assert lines[0]["policy_ref_kl"] == 0 < lines[2]["policy_ref_kl"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_samples_from_the_weights_that_a_plain_folder_is_quantised_to(
    tiny_folder: TinyFolder, tmp_path: Path, dtype: str
) -> None:
    """The trainer computes in fp32, whatever the folder's dtype is; so does the engine."""
    folder = tiny_folder("5", dtype=dtype)
    run = rl_config(folder, tmp_path / "run", model={"base_weights": "fp8"}, rl={"replay": "both"})
    train_rl(run, quiet=True)
    for line in read_metrics(tmp_path / "run"):
        assert line["gap_abs_diff"] < 1e-5 and line["gap_kl"] < 1e-9


@pytest.mark.parametrize(
    ("engine", "base_weights", "is_fp8", "is_told"),
    [
        ("sglang", "fp8", False, True),
        ("sglang", "fp8", True, False),
        ("sglang", "dtype", False, False),
        ("hf", "fp8", False, False),
    ],
)
def test_a_server_that_must_be_given_quantised_weights_is_told(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    engine: str,
    base_weights: str,
    is_fp8: bool,
    is_told: bool,
) -> None:
    folder = tiny_folder("5")
    if is_fp8:
        folder = write_fp8(folder, tmp_path / "fp8")
    server = {} if engine == "hf" else {"url": "http://localhost:1"}
    run = rl_config(
        folder,
        tmp_path / "run",
        model={"base_weights": base_weights},
        rollout={"engine": engine, **server},
    )
    note = describe_quantised_base(run, Glm5Config.from_hf(folder))
    assert (note is not None) == is_told
    assert note is None or str(folder) in note
