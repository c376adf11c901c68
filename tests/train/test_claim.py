from pathlib import Path

import pytest

from glm5.errors import ConfigError
from glm5.train.claim import claimed


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder), pytest.raises(ConfigError, match="another process"):
        claimed(folder).__enter__()
    with claimed(folder):
        pass
