"""`glm5 tiny`."""

import hashlib
from pathlib import Path

import pytest

from glm5.config import Glm5Config
from tests.cli.conftest import Glm5


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_it_writes_a_checkpoint_and_says_where(glm5: Glm5, tmp_path: Path) -> None:
    result = glm5("tiny", tmp_path / "a", "--variant", "5.2", "--seed", 3, "--json")
    assert result.exit_code == 0
    assert result.json == {"folder": str(tmp_path / "a"), "variant": "5.2", "seed": 3}
    assert Glm5Config.from_hf(tmp_path / "a").num_hidden_layers == 7
    result = glm5("tiny", tmp_path / "b", "--variant", "5")
    assert result.exit_code == 0 and f"folder: {tmp_path / 'b'}" in result.out


def test_a_second_time_changes_nothing(glm5: Glm5, tmp_path: Path) -> None:
    assert glm5("tiny", tmp_path / "a", "--variant", "5").exit_code == 0
    before = digests(tmp_path)
    result = glm5("tiny", tmp_path / "a", "--variant", "5.2")
    assert result.exit_code == 2 and "not an empty folder" in result.err
    assert digests(tmp_path) == before


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_out_of_range_is_told(glm5: Glm5, tmp_path: Path, seed: int) -> None:
    result = glm5("tiny", tmp_path / "a", "--variant", "5", "--seed", seed)
    assert result.exit_code == 2
    assert f"got:      {seed}" in result.err and "0 to 4294967295" in result.err
    assert not (tmp_path / "a").exists()


def test_it_writes_an_fp8_release_when_asked(glm5: Glm5, tmp_path: Path) -> None:
    assert glm5("tiny", tmp_path / "a", "--variant", "5", "--fp8").exit_code == 0
    fp8 = Glm5Config.from_hf(tmp_path / "a").fp8
    assert fp8 is not None and fp8.weight_block_size == (128, 128)
