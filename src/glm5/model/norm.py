"""Norms with the rounding order of the published models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.model.parallel import sum_gradient_over_tp
from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight * cast(x / sqrt(mean(x^2) + eps)), the mean in fp32 and the cast before the
    weight.

    x [..., hidden_size] any float dtype; y the same shape and dtype; weight [hidden_size].
    """

    def __init__(self, config: Glm5TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=build_device(config))
        self.weight = nn.Parameter(weight)
        sum_gradient_over_tp(self.weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # row-major: what follows is a linear, and Megatron's embedding has other strides
        return rms_norm(x, self.weight, self.eps)
