"""What may be exported as what, to where, and that the latent norms' eps goes along."""

import shutil
from pathlib import Path

import pytest

from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.export.export import Form, export
from glm5.parity.hf_side import load_reference
from tests.export.conftest import TrainedRun
from tests.exported import (
    config_of,
    distance,
    plain_transformers,
    trained_logits,
    transformers_logits,
)
from tests.tiny_models import TinyFolder

EPS = 1e-2
FULL = {"lora": None, "optimizer": {"lr": 1e-3}}


def test_a_form_that_does_not_fit_is_refused(trained_run: TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds adapters(?s:.*)--as adapter or --as merged"):
        export(trained_run("5", {}), tmp_path / "out", "hf")
    for form in ("adapter", "merged"):
        with pytest.raises(CheckpointError, match=r"holds every weight(?s:.*)--as hf"):
            export(trained_run("5", {}, **FULL), tmp_path / "out", form)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_folder_in_use_is_left_alone(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    # told at once, not after the model was built
    monkeypatch.setattr("glm5.export.export.restore_model", None)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        export(trained_run("5", {}), tmp_path, form)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_among_the_runs_steps_is_refused(trained_run: TrainedRun, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(trained_run("5", {}), tmp_path / "run"))
    steps = run_dir / "checkpoints"
    before = sorted(steps.rglob("*"))
    (tmp_path / "link").symlink_to(steps)
    for out in (steps / "step-00000099", tmp_path / "link" / "x", *steps.glob("step-*")):
        with pytest.raises(CheckpointError, match=r"inside the checkpoint|not an empty folder"):
            export(run_dir, out, "adapter")
    assert sorted(steps.rglob("*")) == before


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out", "adapter")


def test_a_base_that_is_gone_is_named(trained_run: TrainedRun, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(trained_run("5", {}), tmp_path / "run"))
    (record,) = run_dir.rglob("glm5.json")
    text = record.read_text()
    base = Path(text.split('"base": "')[1].split('"')[0])
    record.write_text(text.replace(str(base), "/no/such/base"))
    with pytest.raises(CheckpointError, match=r"no such checkpoint(?s:.*)/no/such/base"):
        export(run_dir, tmp_path / "out", "adapter")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("file", "what"), [("config.json", "config"), ("*-00002-*", "weights")])
def test_a_base_that_changed_is_refused(
    trained_run: TrainedRun,
    tiny_folder: TinyFolder,
    tmp_path: Path,
    file: str,
    what: str,
) -> None:
    run_dir = Path(shutil.copytree(trained_run("5", {}), tmp_path / "run"))
    base = Path(shutil.copytree(tiny_folder("5"), tmp_path / "base"))
    (record,) = run_dir.rglob("glm5.json")
    record.write_text(record.read_text().replace(str(tiny_folder("5")), str(base)))
    (changed,) = base.glob(file)
    content = bytearray(changed.read_bytes())
    content[-2] ^= 1
    changed.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=f"(?s)not what the adapter was trained on.*{what}"):
        export(run_dir, tmp_path / "out", "adapter")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["merged", "hf"])
def test_the_latent_eps_is_written_and_used(
    trained_run: TrainedRun, tmp_path: Path, form: str
) -> None:
    sections = FULL if form == "hf" else {}
    run_dir = trained_run("5", {}, model={"latent_norm_eps": EPS}, **sections)
    checks = export(run_dir, tmp_path / "out", form)  # type: ignore[arg-type]
    assert all(check.ok for check in checks)
    told = checks[1]
    assert told.limit is None and "by itself" in told.what
    assert config_of(tmp_path / "out")["latent_norm_eps"] == EPS
    expected = trained_logits(run_dir)
    config = Glm5Config.from_hf(tmp_path / "out")
    reference = load_reference(tmp_path / "out", config, expected.device)
    assert distance(transformers_logits(reference), expected) <= 1e-4
    # transformers by itself uses 1e-6, which is another model
    assert distance(transformers_logits(plain_transformers(tmp_path / "out")), expected) > 1e-3
    assert told.error > 1e-3


def test_the_latent_eps_is_used_for_the_adapter_too(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run_dir = trained_run("5", {}, model={"latent_norm_eps": EPS})
    check, told = export(run_dir, tmp_path / "out", "adapter")
    assert check.ok and check.limit is not None
    assert told.limit is None and told.error > 1e-3


LORA = {
    "rank": 2,
    "alpha": 4.0,
    "targets": ["q_a_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "expert_lora": "shared_outer",
    "dropout": 0.1,
    "use_rslora": True,
    "rank_pattern": {"shared_experts.up_proj": 3, r"experts\.\d+\.down_proj": 4},
    "alpha_pattern": {"o_proj": 3.0},
    "exclude": ["layers.1.self_attn.o_proj"],
    "train": ["router", "norms"],
}


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_an_adapter_of_every_option_computes_what_was_trained(
    trained_run: TrainedRun, tmp_path: Path, form: Form
) -> None:
    """The export compares the logits itself."""
    checks = export(trained_run("5", {}, lora=LORA), tmp_path / "out", form)
    assert checks and all(check.ok for check in checks)
