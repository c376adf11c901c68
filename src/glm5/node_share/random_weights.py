"""Weights drawn where they lie, so that activations stay finite and tokens spread over experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from glm5.ops.block_scaled import FP8_DTYPE, FP8_MAX

# Drawn at a time: the float copies stay small.
CHUNK_ELEMENTS = 2**22
# Of a float8 weight before its scale: a block's largest value then lies near the greatest one.
FP8_STD = FP8_MAX / 4
# What linears that add to the residual stream scale their outputs by: each token keeps much of its
# embedding, so that tokens differ, and routers send them to all experts alike.
RESIDUAL_GAIN = 0.1
_RESIDUAL = (".linear_proj.", ".linear_fc2.")
_SCALES = "weight_scale_inv"


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Normal weights of variance 1 / inputs, embeddings of variance 1, norms of one.

    Of a float8 weight the values are drawn, and every scale of its buffer weight_scale_inv is the
    same.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            std = _std(f"{path}.{name}", parameter)
            if parameter.dtype == FP8_DTYPE:
                getattr(module, _SCALES).fill_(std / FP8_STD)
                std = FP8_STD
            if parameter.dim() > 1:
                _draw(parameter, std, generator)
            else:
                parameter.fill_(float(name != "bias"))


def _std(path: str, weight: Tensor) -> float:
    if "word_embeddings" in path:
        return 1.0
    gain = RESIDUAL_GAIN if any(part in path for part in _RESIDUAL) else 1.0
    return gain / math.sqrt(weight.shape[-1])


def _draw(weight: Tensor, std: float, generator: torch.Generator) -> None:
    for part in weight.view(-1).split(CHUNK_ELEMENTS):
        values = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        values.normal_(std=std, generator=generator)
        # beyond the greatest value a float8 is NaN
        part.copy_(values.clamp_(-FP8_MAX, FP8_MAX))
