"""Changes of form that keep a delta, and factors that are made when they are asked for."""

import pytest
import torch

from glm5.checkpoint.adapter import (
    FactorSpec,
    LazyFactors,
    LoraAdapter,
    LoraFactors,
    factor_specs,
    padded,
    rescaled,
    scales_exactly,
    without_linears,
)
from glm5.checkpoint.adapter_engines import max_lora_rank

PAIR = LoraFactors(torch.randn(2, 5), torch.randn(4, 2), 3.0)
PATHS = ("model.layers.0.self_attn.o_proj", "model.layers.3.mlp.experts.0.up_proj")


def test_padding_is_exact() -> None:
    wide = padded(PAIR, 7)
    assert wide.spec == FactorSpec(7, 3.0, torch.float32)
    assert torch.equal(wide.b.double() @ wide.a.double(), PAIR.b.double() @ PAIR.a.double())
    assert padded(PAIR, 2) is PAIR
    with pytest.raises(AssertionError, match="does not fit"):
        padded(PAIR, 1)


@pytest.mark.parametrize(("scale", "exact"), [(6.0, True), (0.75, True), (2.0, False)])
def test_another_scale(scale: float, exact: bool) -> None:
    other = rescaled(PAIR, scale)
    assert other.scale == scale and other.a is PAIR.a and other.b.dtype == PAIR.b.dtype
    assert scales_exactly(3.0, scale) == exact
    got, expected = scale * other.b.double(), 3.0 * PAIR.b.double()
    assert torch.equal(got, expected) == exact
    torch.testing.assert_close(got, expected, rtol=2**-24, atol=0)
    assert rescaled(PAIR, 3.0) is PAIR


def test_bf16_is_rounded_once() -> None:
    b = torch.linspace(1, 2, 999).bfloat16()[:, None]
    got = rescaled(LoraFactors(b.T, b, 1.0), 3.0).b
    assert torch.equal(got, (b.double() / 3).bfloat16())


def test_lazy_factors_are_read_when_asked_for() -> None:
    read: list[str] = []

    def load(path: str) -> LoraFactors:
        read.append(path)
        return PAIR

    factors = LazyFactors(dict.fromkeys(PATHS, PAIR.spec), load)
    adapter = LoraAdapter(factors, "per_expert")
    reduced = without_linears(adapter, {"up_proj"})
    assert (list(factors), len(factors), PATHS[0] in factors) == (list(PATHS), 2, True)
    assert factor_specs(factors)[PATHS[1]] == PAIR.spec
    assert list(reduced.factors) == [PATHS[0]] and reduced.expert_lora == "none"
    assert without_linears(adapter, {"o_proj"}).expert_lora == "per_expert"
    assert not read
    assert reduced.factors[PATHS[0]] is PAIR and read == [PATHS[0]]
    for path in ("other", PATHS[1]):
        with pytest.raises(KeyError):
            reduced.factors[path]
        assert reduced.factors.get(path) is None and path not in reduced.factors


@pytest.mark.parametrize(
    ("rank", "vllm"), [(1, 1), (2, 8), (8, 8), (16, 16), (200, 256), (257, 320), (512, 512)]
)
def test_the_rank_that_a_server_is_started_for(rank: int, vllm: int) -> None:
    assert max_lora_rank(rank, "vllm") == vllm
    assert max_lora_rank(rank, "sglang") == rank
