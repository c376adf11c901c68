"""Inputs of the linears that a release quantises go through float8, and nothing else does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from glm5.checkpoint.adapter_io import LoraFactors
from glm5.checkpoint.fp8 import SCALE_SUFFIX
from glm5.checkpoint.load import load_model
from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.model.forward import logits
from glm5.ops.block_scaled import FP8_DTYPE, BlockScaled
from glm5.rl.engines.fp8_activations import seen_in_float8
from glm5.rl.engines.hf import HfEngine
from tests.adapters import make_factors, write
from tests.exported import distance, tensors_of
from tests.rl.engines.prompts import make_requests, make_sampling
from tests.tiny_models import TinyFolder, draw_tokens

CPU = torch.device("cpu")
TOKENS = 40
"""More than the 8 keys that a query selects."""


@pytest.fixture(scope="module")
def fp8(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("5.2", fp8=True)


def make_engine(folder: Path, dtype: torch.dtype = torch.float32) -> HfEngine:
    return HfEngine(folder, Glm5Config.from_hf(folder), CPU, dtype, fp8_activations=True)


@torch.no_grad()
def seen_logits(engine: HfEngine) -> Tensor:
    tokens = draw_tokens(TOKENS)[None]
    found: Tensor = engine._model()(input_ids=tokens, use_cache=False).logits[0]
    return found


def test_pieces_of_a_row_have_scales_of_their_own() -> None:
    x = torch.randn(3, 2, 300) * torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(128)[:300]
    x[1, 1, 128:256] = 0
    got = seen_in_float8(x, 128)
    for start in (0, 128, 256):
        piece = x[..., start : start + 128]
        scale = piece.abs().amax(-1, keepdim=True) / 448
        scale[scale == 0] = 1.0
        expected = (piece / scale).to(FP8_DTYPE).float() * scale
        assert torch.equal(got[..., start : start + 128], expected)
        assert not torch.equal(expected, piece) or not piece.any()
    assert seen_in_float8(x.bfloat16(), 128).dtype == torch.bfloat16


def test_the_model_is_that_of_float8_products_in_the_trainer(fp8: Path) -> None:
    """Two programs that share no line of the model; exact products are far away."""
    got = seen_logits(make_engine(fp8))
    options: dict[str, Any] = {"dtype": "float32", "base_weights": "fp8"}
    with torch.no_grad():
        ours = logits(load_model(fp8, **options, fp8_compute=True), draw_tokens(TOKENS))
        exact = logits(load_model(fp8, **options), draw_tokens(TOKENS))
    # a near-tie that falls differently moves some rows; most are equal
    error = (got - ours).abs().amax(1) / ours.abs().max()
    assert error.median() < 1e-5
    assert ((got - exact).abs().amax(1) / exact.abs().max()).median() > 1e-2


def test_exactly_these_modules_see_float8(fp8: Path) -> None:
    engine = make_engine(fp8)
    model = engine._model()
    watched = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    kept = ("kv_b_proj", "weights_proj", "lm_head")
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(kept)
    }
    experts = {f"model.layers.{layer}.mlp.experts" for layer in (3, 4, 5, 6)}
    assert watched == linears | experts


def test_adapters_see_the_exact_input(fp8: Path, tmp_path: Path) -> None:
    """Those of linears, of weights that PEFT changes, and of fused experts."""
    glm5 = Glm5Config.from_hf(fp8)
    torch.manual_seed(0)
    factors = make_factors(glm5)
    write(tmp_path / "adapter", factors, glm5)
    engine = make_engine(fp8)
    plain = {name: value.clone() for name, value in engine._model().state_dict().items()}
    engine.load_adapter(tmp_path / "adapter", 1)
    model, x = engine._model(), torch.randn(5, 64)

    def expected(weight: Tensor, pair: LoraFactors) -> Tensor:
        return seen_in_float8(x, 128) @ weight.T + x @ (pair.scale * pair.b @ pair.a).T

    for path in (
        "model.layers.0.self_attn.q_a_proj",
        "model.layers.0.self_attn.indexer.wk",
        "model.layers.0.mlp.gate_proj",
        "model.layers.4.mlp.shared_experts.up_proj",
    ):
        with torch.no_grad():
            got = model.get_submodule(path)(x)
        assert distance(got, expected(plain[f"{path}.weight"], factors[path])) < 1e-5, path
    assert distance(experts_output(model, x, 4), experts_by_hand(plain, factors, x, 4)) < 1e-5


@torch.no_grad()
def experts_output(model: Any, x: Tensor, layer: int) -> Tensor:
    """Every row goes to expert 2 alone."""
    rows = torch.full((len(x), 1), 2)
    output: Tensor = model.get_submodule(f"model.layers.{layer}.mlp.experts")(
        x, rows, torch.ones(len(x), 1)
    )
    return output


def experts_by_hand(
    plain: dict[str, Tensor], factors: dict[str, LoraFactors], x: Tensor, layer: int
) -> Tensor:
    path = f"model.layers.{layer}.mlp.experts"

    def linear(x: Tensor, weight: Tensor, name: str) -> Tensor:
        pair = factors[f"{path}.2.{name}"]
        return seen_in_float8(x, 128) @ weight.T + x @ (pair.scale * pair.b @ pair.a).T

    gate, up = plain[f"{path}.gate_up_proj"][2].chunk(2)
    inner = nn.functional.silu(linear(x, gate, "gate_proj")) * linear(x, up, "up_proj")
    return linear(inner, plain[f"{path}.down_proj"][2], "down_proj")


def test_an_adapter_that_goes_leaves_no_trace(fp8: Path, tmp_path: Path) -> None:
    glm5 = Glm5Config.from_hf(fp8)
    factors = make_factors(glm5)
    zero = {p: LoraFactors(f.a, torch.zeros_like(f.b), f.scale) for p, f in factors.items()}
    write(tmp_path / "one", factors, glm5)
    write(tmp_path / "zero", zero, glm5)
    engine = make_engine(fp8)
    before = seen_logits(engine)
    engine.load_adapter(tmp_path / "one", 1)
    assert distance(seen_logits(engine), before) > 0.1
    engine.load_adapter(tmp_path / "zero", 2)
    assert distance(seen_logits(engine), before) < 1e-5


def test_weights_are_what_float8_and_scales_stand_for(tiny_folder: TinyFolder) -> None:
    """Not rounded to the checkpoint's bf16 on the way."""
    folder = tiny_folder("5", fp8=True, dtype="bfloat16")
    engine, name = make_engine(folder), "model.layers.0.mlp.gate_proj.weight"
    stored = tensors_of(folder)
    exact = BlockScaled(stored[name], stored[name + SCALE_SUFFIX]).dequantise(torch.float32)
    assert torch.equal(engine._model().state_dict()[name], exact)
    assert not torch.equal(exact, exact.bfloat16().float())


def test_it_samples_in_bfloat16(fp8: Path) -> None:
    engine = make_engine(fp8, torch.bfloat16)
    assert engine.products == "fp8"
    rollouts = engine.generate(make_requests(), make_sampling(), record="both")
    assert np.isfinite(np.concatenate([rollout.log_probs for rollout in rollouts])).all()


def test_a_checkpoint_without_float8_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"fp8_activations is for FP8 checkpoints"):
        make_engine(folder)
    assert HfEngine(folder, Glm5Config.from_hf(folder), CPU).products == "exact"
