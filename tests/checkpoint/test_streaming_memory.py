"""A checkpoint is written and read with a tensor or two in memory, however large it is."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.safetensors_io import MAPPED_BYTES
from glm5.config import Glm5Config
from tests.checkpoint.streaming import FEW_BYTES

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


def test_reading_a_large_shard_needs_what_may_be_mapped_and_a_tensor(
    peaks: dict[str, float],
) -> None:
    """Pages of a mapped file count: a shard of 5 GB would be more than a rank may take."""
    assert peaks["read one shard"] <= FEW_BYTES / 2**20 + TENSOR_MIB + SLACK_MIB


def test_reading_slices_needs_no_whole_tensors(peaks: dict[str, float]) -> None:
    assert peaks["read slices"] <= SHARD_MIB + SLACK_MIB


def test_filling_float8_weights_needs_a_tensor_and_its_check(peaks: dict[str, float]) -> None:
    """The values as they are read; then, without them, two bytes each while they are looked at."""
    assert peaks["fill from float8"] <= SHARD_MIB + 2 * TENSOR_MIB + SLACK_MIB


def test_quantising_on_the_way_needs_a_tensor_and_a_strip(peaks: dict[str, float]) -> None:
    """The weight as it is read, half as much in float8, and one strip of eight in fp32."""
    assert peaks["fill from bf16"] <= SHARD_MIB + 2 * TENSOR_MIB + SLACK_MIB


@pytest.mark.parametrize("variant", ["glm5", "glm52"])
def test_the_full_model_needs_less_than_4_gib_of_a_host(variant: str) -> None:
    """On one tensor-parallel rank, where slices are largest: a tensor (2 bytes a value), what may
    be mapped, and a process with its libraries (benchmarks/load_memory measures all of it)."""
    folder = Path(__file__).parents[2] / "src/glm5/configs"
    config = Glm5Config.from_hf_dict(json.loads((folder / f"{variant}.json").read_text()))
    sizes = [math.prod(tensor.shape) for tensor in hf_tensors(config).values()]
    assert 2 * max(sizes) + MAPPED_BYTES + 2**30 < 4 * 2**30
