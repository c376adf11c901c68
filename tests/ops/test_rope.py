import math

import pytest
import torch

from glm5.errors import ConfigError
from glm5.ops.rope import apply_rope, rope_cos_sin

THETA = 8e6


def _rotate_by_complex_numbers(
    x: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    dim = x.shape[-1]
    frequencies = THETA ** (-torch.arange(0, dim, 2).double() / dim)
    turn = torch.polar(torch.ones(1).double(), positions[:, None].double() * frequencies)
    order = torch.arange(dim)
    pairs = order.view(-1, 2) if interleaved else order.view(2, -1).T
    values = x.double()[..., pairs]
    turned = torch.view_as_complex(values.contiguous()) * turn.view(len(x), 1, -1)
    result = torch.empty_like(x, dtype=torch.float64)
    result[..., pairs] = torch.view_as_real(turned)
    return result


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_equals_complex_multiplication(interleaved: bool) -> None:
    x, positions = torch.randn(5, 3, 8), torch.tensor([0, 1, 7, 100, 3])
    rotated = apply_rope(x, *rope_cos_sin(positions, 8, THETA), interleaved=interleaved)
    expected = _rotate_by_complex_numbers(x, positions, interleaved)
    torch.testing.assert_close(rotated.double(), expected, atol=1e-5, rtol=1e-5)
    wrong = _rotate_by_complex_numbers(x, positions, not interleaved)
    assert (rotated - wrong).abs().max() > 0.1


def test_scores_equal_those_of_transformers() -> None:
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
        apply_rotary_pos_emb_interleave,
    )

    q, k, positions = torch.randn(9, 3, 8), torch.randn(9, 1, 8), torch.arange(9) * 5
    cos, sin = rope_cos_sin(positions, 8, THETA)
    hf_q, hf_k = apply_rotary_pos_emb_interleave(
        q, k, cos.repeat(1, 2), sin.repeat(1, 2), unsqueeze_dim=1
    )
    our_q = apply_rope(q, cos, sin, interleaved=True)
    our_k = apply_rope(k, cos, sin, interleaved=True)
    hf_scores = torch.einsum("thd,sd->hts", hf_q, hf_k[:, 0])
    torch.testing.assert_close(torch.einsum("thd,sd->hts", our_q, our_k[:, 0]), hf_scores)
    half_ordered = torch.cat([our_q[..., 0::2], our_q[..., 1::2]], dim=-1)
    torch.testing.assert_close(half_ordered, hf_q, rtol=0, atol=0)
    split = apply_rope(q, cos, sin, interleaved=False), apply_rope(k, cos, sin, interleaved=False)
    assert not torch.allclose(torch.einsum("thd,sd->hts", split[0], split[1][:, 0]), hf_scores)


def test_table_equals_that_of_transformers() -> None:
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

    config = GlmMoeDsaConfig(rope_parameters={"rope_type": "default", "rope_theta": THETA})
    positions = torch.tensor([0, 3, 1000, 131071])
    hf_cos, hf_sin = GlmMoeDsaRotaryEmbedding(config)(torch.ones(1), positions[None])
    cos, sin = rope_cos_sin(positions, config.qk_rope_head_dim, THETA)
    half = config.qk_rope_head_dim // 2
    assert torch.equal(cos, hf_cos[0, :, :half])
    assert torch.equal(sin, hf_sin[0, :, :half])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (3, 4), (3, 5, 6), (3, 2, 2, 4)])
def test_middle_dimensions_share_the_table(shape: tuple[int, ...], interleaved: bool) -> None:
    x = torch.randn(shape)
    cos, sin = rope_cos_sin(torch.arange(shape[0]), shape[-1], THETA)
    rotated = apply_rope(x, cos, sin, interleaved=interleaved)
    assert rotated.shape == x.shape
    flat = x.reshape(shape[0], math.prod(shape[1:-1]), shape[-1])
    for head in range(flat.shape[1]):
        alone = apply_rope(flat[:, head], cos, sin, interleaved=interleaved)
        assert torch.equal(rotated.reshape_as(flat)[:, head], alone)


def test_bf16_is_rounded_once_at_the_end() -> None:
    x = torch.randn(6, 2, 8).bfloat16()
    cos, sin = rope_cos_sin(torch.arange(6), 8, THETA)
    rotated = apply_rope(x, cos, sin, interleaved=True)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin, interleaved=True).bfloat16())


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradient(interleaved: bool) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = rope_cos_sin(torch.arange(3), 4, 10.0)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin, interleaved=interleaved), x)


def test_wrong_sizes_raise() -> None:
    with pytest.raises(ConfigError, match="even"):
        rope_cos_sin(torch.arange(3), 5, THETA)
    cos, sin = rope_cos_sin(torch.arange(3), 4, THETA)
    with pytest.raises(ConfigError, match="do not fit"):
        apply_rope(torch.ones(3, 8), cos, sin, interleaved=True)
    with pytest.raises(ConfigError, match="do not fit"):
        apply_rope(torch.ones(2, 4), cos, sin, interleaved=True)
