"""load_model: dtypes are exact unless asked otherwise, and bad checkpoints are named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.errors import BackendError, CheckpointError, ConfigError
from glm5.model.forward import logits
from tests.hf_folders import drop_mtp, rewrite
from tests.tiny_models import TinyFolder, draw_tokens

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
ROUTER = "model.layers.1.mlp.gate.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_the_checkpoints_unless_asked(tiny_folder: TinyFolder, dtype: str) -> None:
    folder = tiny_folder("5", dtype=dtype)
    own = load_model(folder)
    assert {p.dtype for p in own.parameters()} == {getattr(torch, dtype)}
    assert not own.training
    for asked in ("float32", torch.bfloat16):
        expected = torch.float32 if asked == "float32" else torch.bfloat16
        model = load_model(folder, dtype=asked)
        assert {p.dtype for p in model.parameters()} == {expected}


def test_another_backend_computes_the_same(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5.2")
    tokens = draw_tokens(29)
    with torch.no_grad():
        ours = logits(load_model(folder, backend="torch"), tokens)
        peer = logits(load_model(folder, backend="megatron"), tokens)
    assert (ours - peer).abs().max() <= 1e-5 * peer.abs().max()
    with pytest.raises(BackendError, match="nosuch"):
        load_model(folder, backend="nosuch")


def fp32_router(tensors: dict[str, Tensor]) -> None:
    """As transformers 5.24 saves a model that trained in bf16."""
    tensors[ROUTER] = tensors[ROUTER].float() + 1e-5


def test_the_own_dtype_rounds_nothing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = rewrite(tiny_folder("5", dtype="bfloat16"), tmp_path / "hf", fp32_router)
    # naming the checkpoint's own dtype, as every run does, is no permission either
    for dtype in (None, "bfloat16", torch.bfloat16):
        with pytest.raises(CheckpointError) as caught:
            load_model(folder, dtype=dtype)
        text = str(caught.value)
        assert ROUTER in text and ".safetensors" in text and "dtype='float32'" in text
    exact = load_model(folder, dtype="float32").decoder.layers[1].mlp.router.weight
    assert exact.dtype == torch.float32
    assert not torch.equal(exact, exact.bfloat16().float())


def test_values_that_fit_may_have_a_wider_dtype(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[ROUTER] = tensors[ROUTER].float()

    folder = rewrite(tiny_folder("5", dtype="bfloat16"), tmp_path / "hf", widen)
    assert load_model(folder).decoder.layers[1].mlp.router.weight.dtype == torch.bfloat16


def test_a_checkpoint_without_mtp(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = rewrite(tiny_folder("5"), tmp_path / "hf", drop_mtp)
    assert load_model(folder).mtp_process is False
    with pytest.raises(CheckpointError, match="has no MTP layer"):
        load_model(folder, include_mtp=True)


def missing(tensors: dict[str, Tensor]) -> None:
    del tensors[O_PROJ]


def extra(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(4)


def wrong_shape(tensors: dict[str, Tensor]) -> None:
    tensors[O_PROJ] = tensors[O_PROJ].T.contiguous()


def part_of_mtp(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.3.eh_proj.weight"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (missing, rf"are missing(?s:.*){O_PROJ}"),
        (extra, r"does not know(?s:.*)o_proj.bias"),
        (wrong_shape, rf"{O_PROJ} in .*\.safetensors has the wrong shape(?s:.*)\(64, 128\)"),
        (part_of_mtp, r"are missing(?s:.*)eh_proj.weight"),
    ],
)
def test_what_is_not_right_is_named(
    tiny_folder: TinyFolder, tmp_path: Path, change: object, named: str
) -> None:
    folder = rewrite(tiny_folder("5"), tmp_path / "hf", change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=named) as caught:
        load_model(folder)
    assert caught.value.exit_code == 2


def test_a_float8_tensor_needs_its_scale(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def drop_scale(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{O_PROJ}_scale_inv"]

    folder = rewrite(tiny_folder("5", fp8=True, dtype="bfloat16"), tmp_path / "hf", drop_scale)
    with pytest.raises(CheckpointError, match="without their _scale_inv") as caught:
        load_model(folder)
    assert O_PROJ in str(caught.value.got) and ".safetensors" in str(caught.value.got)


@pytest.mark.parametrize("dtype", ["float16", "", "fp32", torch.float64, ["bfloat16"], 16])
def test_a_dtype_that_no_model_has(tiny_folder: TinyFolder, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="this dtype is not supported"):
        load_model(tiny_folder("5"), dtype=dtype)


@pytest.mark.parametrize("backend", ["", "Torch", "nosuch"])
def test_a_backend_that_does_not_exist(tiny_folder: TinyFolder, backend: str) -> None:
    with pytest.raises(BackendError, match=r"(?s)unknown attention backend.*torch, triton"):
        load_model(tiny_folder("5"), backend=backend)


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), float("inf")])
def test_an_epsilon_that_is_none(tiny_folder: TinyFolder, eps: float) -> None:
    with pytest.raises(ConfigError, match="latent_norm_eps is no epsilon"):
        load_model(tiny_folder("5"), latent_norm_eps=eps)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("gpu", "this is no device"),
        ("", "this is no device"),
        (3.5, "this is no device"),
        ("meta", "this device is not supported"),
        ("mps", "this device is not supported"),
        pytest.param("cuda", "there is no CUDA device here", marks=WITHOUT_GPU),
        pytest.param("cuda:0", "there is no CUDA device here", marks=WITHOUT_GPU),
    ],
)
def test_a_device_that_is_not_here(tiny_folder: TinyFolder, device: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(tiny_folder("5"), device=device)


def test_the_latent_eps_is_used(tiny_folder: TinyFolder) -> None:
    tokens = draw_tokens(5)
    models = [load_model(tiny_folder("5"), latent_norm_eps=eps) for eps in (None, 1e-6, 1.0)]
    with torch.no_grad():
        default, same, other = (logits(model, tokens) for model in models)
    assert torch.equal(default, same)
    assert (default - other).abs().max() > 1e-2
