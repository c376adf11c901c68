"""Drawn weights: finite, of the right size, float8 ones with their scales."""

import math

import torch
from torch import Tensor, nn

from glm5.node_share.random_weights import CHUNK_ELEMENTS, FP8_STD, draw_weights
from glm5.ops.block_scaled import FP8_DTYPE, BlockScaled


class Float8(nn.Module):
    """A linear as frozen ones hold it, its memory full of NaN."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        nan = torch.full((rows, columns), torch.nan).to(FP8_DTYPE)
        self.weight = nn.Parameter(nan, requires_grad=False)
        scales = torch.full((math.ceil(rows / 128), math.ceil(columns / 128)), torch.nan)
        self.register_buffer("weight_scale_inv", scales)

    @property
    def dequantised(self) -> Tensor:
        scales = self.get_buffer("weight_scale_inv")
        return BlockScaled(self.weight.data, scales).dequantise(torch.float32)


def test_float8_weights_are_finite_and_of_variance_1_over_inputs() -> None:
    # more than is drawn at a time, and ragged blocks
    model = nn.ModuleDict({"linear_q_up_proj": Float8(CHUNK_ELEMENTS // 1000 + 1, 1000)})
    draw_weights(model)
    weight = model["linear_q_up_proj"].dequantised
    assert weight.isfinite().all()
    assert abs(float(weight.std()) * math.sqrt(1000) - 1) < 0.02
    assert (model["linear_q_up_proj"].weight.float().abs() > 3 * FP8_STD).any()


def test_each_kind_of_weight_has_its_own_size() -> None:
    layer = nn.ModuleDict(
        {
            "word_embeddings": nn.Embedding(500, 64),
            "linear_proj": nn.Linear(256, 100),
            "linear_fc1": nn.Linear(256, 100),
            "k_norm": nn.LayerNorm(16),
        }
    )
    draw_weights(nn.ModuleDict({"layer": layer}))
    stds = {name: float(module.weight.detach().std()) for name, module in layer.items()}
    assert abs(stds["word_embeddings"] - 1) < 0.05
    assert abs(stds["linear_fc1"] * 16 - 1) < 0.05
    assert abs(stds["linear_proj"] * 16 - 0.1) < 0.005
    norm = layer["k_norm"]
    assert (norm.weight == 1).all() and (norm.bias == 0).all()


def test_the_same_seed_draws_the_same() -> None:
    weights = []
    for _ in range(2):
        linear = nn.ModuleDict({"linear": nn.Linear(8, 8)})
        draw_weights(linear, seed=3)
        weights.append(linear["linear"].weight)
    assert torch.equal(*weights)
