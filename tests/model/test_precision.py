"""bf16: the error against fp32 is within twice that of `transformers` in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM

from glm5.checkpoint.load import load_model
from glm5.config import Glm5Config
from glm5.parity.hf_side import load_reference, observe_hf
from glm5.parity.mcore_side import observe_mcore
from glm5.parity.observation import Observation
from tests.tiny_models import TinyFolder, draw_tokens

# Up to topk nothing is selected, so no rounding is turned into another set of keys.
LENGTHS = (8,) * 12


@pytest.fixture(scope="module")
def observations(tiny_folder: TinyFolder) -> dict[str, Observation]:
    """The same bf16 weights computed three ways."""
    folder = tiny_folder("5", dtype="bfloat16")
    glm5 = Glm5Config.from_hf(folder)
    token_ids = draw_tokens(sum(LENGTHS))
    exact = load_reference(folder, glm5, torch.device("cpu"))
    model = load_model(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    return {
        "fp32": observe_hf(exact, token_ids, LENGTHS),
        "theirs": observe_hf(_bf16_reference(folder, exact.config), token_ids, LENGTHS),
        "ours": observe_mcore(model, token_ids, LENGTHS),
    }


def _bf16_reference(folder: Path, config: Any) -> Any:
    return GlmMoeDsaForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


def rms_error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_logits_and_hidden_states_stay_in_the_budget(observations: dict[str, Observation]) -> None:
    exact, theirs, ours = (observations[name] for name in ("fp32", "theirs", "ours"))
    assert ours.logits.dtype == torch.bfloat16
    pairs = [(o.logits, t.logits, e.logits) for o, t, e in [(ours, theirs, exact)]]
    pairs += [(ours.hidden[i], theirs.hidden[i], exact.hidden[i]) for i in exact.hidden]
    for mine, other, right in pairs:
        error, budget = rms_error(mine, right), 2 * rms_error(other, right)
        assert 0 < error <= budget, f"{error:.3g} of {budget:.3g}"
        assert budget < 0.2


def test_gradients_stay_in_the_budget(observations: dict[str, Observation]) -> None:
    exact, theirs, ours = (observations[name].gradients for name in ("fp32", "theirs", "ours"))
    assert ours.keys() == exact.keys()

    def total(gradients: dict[str, Tensor]) -> float:
        scaled = [rms_error(gradients[name], exact[name]) ** 2 for name in _reached(exact)]
        return (sum(scaled) / len(scaled)) ** 0.5

    assert len(_reached(exact)) > 60
    assert 0 < total(ours) <= 2 * total(theirs)


def _reached(gradients: dict[str, Tensor]) -> list[str]:
    """An expert without tokens has a zero gradient, which has no relative error."""
    return [name for name, gradient in gradients.items() if gradient.any()]


def test_the_head_weights_of_the_indexer_stay_fp32(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5", dtype="bfloat16"))
    attention = model.decoder.layers[0].self_attention
    seen: list[Any] = []
    attention.indexer.register_forward_hook(lambda module, args, out: seen.append((args, out[1])))
    observe_mcore(model, draw_tokens(8), [8], gradients=False)
    (x, *_), inputs = seen[0]
    assert inputs.weights.dtype == torch.float32
    assert inputs.q.dtype == inputs.k.dtype == torch.bfloat16
    weight = attention.indexer.linear_weights_proj.weight
    expected = x[:, 0].float() @ weight.float().T * (16 * 16) ** -0.5
    assert torch.allclose(inputs.weights, expected, rtol=1e-5, atol=1e-7)
