"""RMSNorm rounds as `transformers` does, bit for bit."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from glm5.checkpoint.load import load_model
from glm5.model.norm import RMSNorm
from tests.tiny_models import TinyFolder, modules_of


@pytest.fixture(scope="module")
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 300.0])
def test_equal_to_transformers(
    model: GPTModel, dtype: torch.dtype, eps: float, scale: float
) -> None:
    ours, theirs = RMSNorm(model.config, 24, eps).to(dtype), GlmMoeDsaRMSNorm(24, eps).to(dtype)
    weight = (1 + 0.3 * torch.randn(24)).to(dtype)
    ours.weight.data, theirs.weight.data = weight.clone(), weight.clone()
    x = (scale * torch.randn(3, 2, 24)).to(dtype)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_ours, y_theirs = ours(x_ours), theirs(x_theirs)
    assert y_ours.dtype == dtype
    assert torch.equal(y_ours, y_theirs)
    (y_ours.sum() + y_theirs.sum()).backward()
    assert torch.allclose(x_ours.grad, x_theirs.grad, rtol=1e-5, atol=1e-5 * x.abs().max() + 1e-6)


def test_each_norm_of_the_model_has_its_own_eps(model: GPTModel) -> None:
    eps = {path: norm.eps for path, norm in modules_of(model, RMSNorm)}
    latent = {path for path in eps if path.endswith((".q_layernorm", ".kv_layernorm"))}
    assert len(latent) == 6
    assert {eps[path] for path in latent} == {1e-6}
    assert {eps[path] for path in eps.keys() - latent} == {1e-5}
    assert len(eps) == 6 + 2 * 3 + 1
