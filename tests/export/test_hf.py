"""Every weight under its Hugging Face name, in the dtype that it was in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.convert import hf_weights
from glm5.checkpoint.dequantise import rewrite_checkpoint
from glm5.checkpoint.to_megatron import convert
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError, CheckpointError
from glm5.export import hf as hf_module
from glm5.export.export import export
from tests.export.conftest import TrainedRun
from tests.exported import (
    SMALL_FILES,
    config_of,
    distance,
    plain_transformers,
    tensors_of,
    trained_logits,
    transformers_logits,
)
from tests.hf_folders import drop_mtp, rewrite
from tests.tiny_models import TinyFolder


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("5", {}),
        ("5.2", {}),
        ("5.2", {"dtype": "bfloat16"}),
        ("5", {"dtype": "bfloat16", "fp8": True}),
    ],
)
def test_converted_and_exported_is_the_source(
    tiny_folder: TinyFolder, tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    source = tiny_folder(variant, **options)
    convert(source, tmp_path / "ckpt")
    (check,) = export(tmp_path / "ckpt", tmp_path / "out", "hf")
    assert check.ok
    if options.get("fp8"):
        rewrite_checkpoint(source, tmp_path / "plain", Glm5Config.from_hf(source))
        source = tmp_path / "plain"
    expected, got = tensors_of(source), tensors_of(tmp_path / "out")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    assert config_of(tmp_path / "out") == config_of(source)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= SMALL_FILES


def test_without_mtp_the_config_says_so(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = rewrite(tiny_folder("5"), tmp_path / "hf", drop_mtp)
    convert(source, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", "hf")
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert tensors_of(tmp_path / "out").keys() == tensors_of(source).keys()


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize(("base", "trained"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_full_training_is_exported_in_the_dtype_that_it_trained_in(
    trained_run: TrainedRun, tmp_path: Path, base: str, trained: str, mtp: bool
) -> None:
    run_dir = trained_run(
        "5",
        {"dtype": base},
        lora=None,
        model={"dtype": trained, "mtp": mtp},
        optimizer={"lr": 1e-3},
    )
    (check,) = export(run_dir, tmp_path / "out", "hf")
    assert check.ok
    config = config_of(tmp_path / "out")
    assert (config["dtype"], config["num_nextn_predict_layers"]) == (trained, int(mtp))
    got = tensors_of(tmp_path / "out")
    assert any("eh_proj" in name for name in got) == mtp
    assert got["lm_head.weight"].dtype == getattr(torch, trained)
    model = plain_transformers(tmp_path / "out")
    assert distance(transformers_logits(model), trained_logits(run_dir)) <= 1e-4


def sabotaged(tensors: dict[str, Tensor], rules: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in hf_weights(tensors, rules):
        yield name, tensor * 1.01 if name == "model.norm.weight" else tensor


def dropping(tensors: dict[str, Tensor], rules: Any) -> Iterator[tuple[str, Tensor]]:
    return ((n, t) for n, t in hf_weights(tensors, rules) if n != "model.norm.weight")


@pytest.mark.parametrize(
    ("writer", "error"), [(sabotaged, CheckFailedError), (dropping, CheckpointError)]
)
def test_a_writer_that_goes_wrong_publishes_nothing(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: Any,
    error: type[Exception],
) -> None:
    convert(tiny_folder("5"), tmp_path / "ckpt")
    monkeypatch.setattr(hf_module, "hf_weights", writer)
    with pytest.raises(error):
        export(tmp_path / "ckpt", tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
