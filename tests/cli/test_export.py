"""`glm5 export --as merged --weights`: the option arrives, and what is stored is told."""

from pathlib import Path

from glm5.config import Glm5Config
from tests.cli.conftest import Glm5
from tests.tiny_models import TinyFolder
from tests.training import run_tables, write_toml


def test_how_a_merged_checkpoint_is_stored(
    glm5: Glm5, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    optimizer = {"lr": 0.1, "schedule": "constant"}
    base = tiny_folder("5", dtype="bfloat16", fp8=True)
    tables = run_tables(base, tmp_path / "run", train={"steps": 2}, optimizer=optimizer)
    assert glm5("train", write_toml(tmp_path / "run.toml", tables)).exit_code == 0
    merged = ["export", tmp_path / "run", "--as", "merged", "--json"]
    for options, stored in (
        ([], "fp8"),
        (["--weights", "fp8"], "fp8"),
        (["--weights", "bf16"], "bfloat16"),
    ):
        out = tmp_path / "-".join(["out", *options])
        result = glm5(*merged, out, *options)
        assert result.exit_code == 0 and result.json["weights"] == stored
        assert (Glm5Config.from_hf(out).fp8 is not None) == (stored == "fp8")
    adapter = ["export", tmp_path / "run", tmp_path / "x", "--as", "adapter"]
    result = glm5(*adapter, "--weights", "fp8")
    assert result.exit_code == 2 and "says nothing of --as adapter" in result.err
    assert glm5(*merged, tmp_path / "x", "--weights", "int4").exit_code == 2
