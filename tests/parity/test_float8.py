"""`verify` of models on frozen float8 weights, and what it tells of products in float8."""

from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

import glm5.ops.block_scaled.product as product
from glm5.checkpoint.load import load_model
from glm5.config import Glm5Config
from glm5.model.frozen import BlockScaledWeight
from glm5.parity.float8 import float8_findings
from glm5.parity.hf_side import load_float8_reference
from glm5.parity.verify import Report, cases, verify
from tests.tiny_models import TinyFolder, draw_tokens, modules_of

CPU = torch.device("cpu")
TOLD = 6


def frozen(folder: Path) -> GPTModel:
    return load_model(folder, dtype="float32", base_weights="fp8")


def failed(report: Report) -> set[tuple[str, str]]:
    return {(f.case, f.quantity) for f in report.findings if not f.ok}


def checked(folder: Path, model: GPTModel) -> Report:
    return verify(model, load_float8_reference(folder, Glm5Config.from_hf(folder), CPU))


@pytest.mark.parametrize("kind", ["small blocks", "an FP8 release in bf16", "quantised"])
def test_a_frozen_model_is_the_dequantised_one(
    tiny_folder: TinyFolder, fp8_folder: TinyFolder, kind: str
) -> None:
    folder = {
        "small blocks": lambda: fp8_folder("5.2"),
        "an FP8 release in bf16": lambda: tiny_folder("5.2", fp8=True, dtype="bfloat16"),
        "quantised": lambda: tiny_folder("5.2", dtype="bfloat16"),
    }[kind]()
    report = checked(folder, frozen(folder))
    assert failed(report) == set() and report.ok
    assert len(report.findings) == 1 + 5 * len(cases(8)) + TOLD
    exact = [f for f in report.findings if not f.case.startswith("fp8_compute")]
    assert max(f.error for f in exact) < 1e-5


def test_one_wrong_scale_is_found(fp8_folder: TinyFolder) -> None:
    model = frozen(fp8_folder("5"))
    path, module = list(modules_of(model, BlockScaledWeight))[3]
    module.weight_scale_inv.view(-1)[-1] *= 1.5
    assert {("long", "logits"), ("long", "gradients")} <= failed(checked(fp8_folder("5"), model)), (
        path
    )


def test_a_value_that_is_none_is_found(fp8_folder: TinyFolder) -> None:
    for spoil in ("value", "scale"):
        model = frozen(fp8_folder("5"))
        experts = model.decoder.layers[1].mlp.experts.linear_fc2
        if spoil == "value":
            experts.weight.view(torch.uint8)[3, 0, 0] = 0x7F
        else:
            experts.weight_scale_inv[3, 0, 0] = 0
        (finding,) = (
            f for f in checked(fp8_folder("5"), model).findings if "not finite" in f.quantity
        )
        assert not finding.ok and ".local_experts.3.linear_fc2.weight" in finding.worst


def errors(model: GPTModel) -> dict[tuple[str, str], tuple[float, bool]]:
    tokens = draw_tokens(29)
    return {(f.case, f.quantity): (f.error, f.ok) for f in float8_findings(model, tokens)}


def test_what_products_in_float8_change_is_told(fp8_folder: TinyFolder) -> None:
    model = frozen(fp8_folder("5.2"))
    found = errors(model)
    assert len(found) == TOLD
    for quantity in ("mean logit difference", "largest logit difference", "KL of the next token"):
        same, own = (found[c, quantity][0] for c in ("fp8_compute, same choices", "fp8_compute"))
        # a near tie that falls the other way comes on top
        assert 0 < same < own
    assert found["fp8_compute, same choices", "mean logit difference"][0] < 0.2
    # the model computes exactly again
    assert not any(m.fp8_compute for _, m in modules_of(model, BlockScaledWeight))


def test_mistakes_in_float8_products_pass_the_limit(
    fp8_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frozen(fp8_folder("5.2"))
    right = product.quantise_rows

    def twice(x: Tensor, piece: int) -> tuple[Tensor, Tensor]:
        values, scales = right(x, piece)
        return values, 2 * scales

    def shifted(x: Tensor, piece: int) -> tuple[Tensor, Tensor]:
        values, scales = right(x, piece)
        return values, scales.roll(1, 1)

    def nan(x: Tensor, piece: int) -> tuple[Tensor, Tensor]:
        values, scales = right(x, piece)
        return values, scales * torch.nan

    for mistake in (twice, shifted, nan):
        monkeypatch.setattr(product, "quantise_rows", mistake)
        assert not errors(model)["fp8_compute, same choices", "mean logit difference"][1], mistake
