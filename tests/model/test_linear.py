"""The absorbed attention's two products equal the unabsorbed formulas."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.load import load_model
from glm5.model.linear import LatentUpProjection, ReplicatedLinear
from tests.tiny_models import TinyFolder, assert_close


@pytest.fixture(scope="module")
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5"))


@pytest.fixture
def projection(model: GPTModel) -> LatentUpProjection:
    return model.decoder.layers[0].self_attention.linear_kv_up_proj


def test_absorbed_logits_are_the_unabsorbed_ones(
    model: GPTModel, projection: LatentUpProjection
) -> None:
    glm5 = model.config.glm5
    heads, nope, v_dim = glm5.num_attention_heads, glm5.qk_nope_head_dim, glm5.v_head_dim
    q_nope, c = torch.randn(5, heads, nope), torch.randn(7, glm5.kv_lora_rank)
    with torch.no_grad():
        # what kv_b_proj computes: per head, the key above the value
        kv = (c @ projection.weight.T).view(7, heads, nope + v_dim)
        k, v = kv.split([nope, v_dim], dim=-1)
        absorbed = torch.einsum("thr,sr->hts", projection.absorb_query(q_nope), c)
        assert_close(absorbed, torch.einsum("thd,shd->hts", q_nope, k))
        weights = torch.randn(heads, 5, 7).softmax(-1)
        out_latent = torch.einsum("hts,sr->thr", weights, c)
        expected = torch.einsum("hts,shd->thd", weights, v)
        assert_close(projection.expand_output(out_latent), expected)


def test_no_tokens_give_no_rows(model: GPTModel, projection: LatentUpProjection) -> None:
    glm5 = model.config.glm5
    heads = glm5.num_attention_heads
    q = projection.absorb_query(torch.zeros(0, heads, glm5.qk_nope_head_dim))
    assert q.shape == (0, heads, glm5.kv_lora_rank)
    assert projection.expand_output(q).shape == (0, heads, glm5.v_head_dim)


def test_a_compute_dtype_widens_the_product(model: GPTModel) -> None:
    linear = ReplicatedLinear(64, 3, config=model.config, compute_dtype=torch.float32)
    linear.to(torch.bfloat16)
    with torch.no_grad():
        linear.weight.normal_()
    x = torch.randn(4, 64).bfloat16()
    y, bias = linear(x)
    assert (y.dtype, bias) == (torch.float32, None)
    assert torch.equal(y, x.float() @ linear.weight.float().T)
    narrow = ReplicatedLinear(64, 3, config=model.config).to(torch.bfloat16)
    assert narrow(x)[0].dtype == torch.bfloat16
