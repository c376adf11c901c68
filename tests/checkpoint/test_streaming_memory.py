"""A checkpoint is written and read with a tensor or two in memory, however large it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MODEL_MIB, TENSOR_MIB, SHARD_MIB = 128, 4, 8
# What else a process touches: buffers, code that is loaded late.
SLACK_MIB = 6


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Peak memory above the start, in a process of its own."""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        # every tensor is a mapping of its own, so that memory once freed never hides a peak
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
    }
    command = [sys.executable, "-m", "tests.checkpoint.streaming"]
    result = subprocess.run(
        command,
        cwd=tmp_path_factory.mktemp("streaming"),
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    peaks: dict[str, float] = json.loads(result.stdout)
    return peaks


def test_the_measure_sees_what_is_kept(peaks: dict[str, float]) -> None:
    assert peaks["write and keep"] >= MODEL_MIB - SLACK_MIB


@pytest.mark.parametrize("shards", ["one shard", "small shards"])
def test_writing_needs_one_tensor_beside_the_callers(peaks: dict[str, float], shards: str) -> None:
    assert peaks[f"write {shards}"] <= 2 * TENSOR_MIB + SLACK_MIB


def test_reading_needs_a_shard_and_a_tensor(peaks: dict[str, float]) -> None:
    assert peaks["read"] <= SHARD_MIB + 2 * TENSOR_MIB + SLACK_MIB


def test_reading_slices_needs_no_whole_tensors(peaks: dict[str, float]) -> None:
    assert peaks["read slices"] <= SHARD_MIB + SLACK_MIB
