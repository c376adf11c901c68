"""`glm5 convert-core`."""

from pathlib import Path

import pytest

from tests.cli.conftest import Glm5
from tests.tiny_models import TinyFolder


@pytest.mark.parametrize(("rope", "norms"), [("last", "fused"), ("first", "own")])
def test_there_and_back(
    glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path, rope: str, norms: str
) -> None:
    folder, core, back = tiny_folder("5"), tmp_path / "core", tmp_path / "back"
    options = ("--indexer-rope", rope, "--latent-norms", norms, "--json")
    result = glm5("convert-core", folder, core, "--to", "core", *options)
    assert result.exit_code == 0
    layout = {"indexer_rope": rope, "latent_norms": norms, "mlp_norm": "fused"}
    assert result.json == {"folder": str(core), "for": "core"} | layout
    result = glm5("convert-core", core, back, "--to", "hf", "--model", folder, "--json")
    assert result.exit_code == 0 and result.json == {"folder": str(back), "for": "hf"} | layout
    assert glm5("verify", back, "--json").json["ok"] is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "hf"), "--model is the Hugging Face folder"),
        (("--to", "core", "--model", "x"), "--model is the Hugging Face folder"),
        (("--to", "hf", "--model", "x", "--latent-norms", "own"), "leave --latent-norms out"),
        (("--to", "core", "--indexer-rope", "middle"), "middle"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    result = glm5("convert-core", tiny_folder("5"), tmp_path / "out", *options)
    assert result.exit_code == 2 and said in result.err
    assert not (tmp_path / "out").exists()
