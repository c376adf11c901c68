"""Dropout whose mask is drawn again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from glm5.lora.seeds import seed_of


class LoraDropout:
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p).

    The seed of a mask comes from torch's CPU generator, which Megatron puts back when it
    recomputes, and from which tokens a rank holds: ranks with the same ones drop the same
    elements. The device is not waited for.
    """

    def __init__(self, p: float, holder: str) -> None:
        self.p = p
        self._holder = holder

    def __call__(self, x: Tensor) -> Tensor:
        """x [...] floating -> the same shape and dtype; differentiable."""
        drawn = int(torch.randint(2**62, ()))
        return _SeededDropout.apply(x, self.p, seed_of(drawn, self._holder))


def seed_masks(seed: int, step: int) -> None:
    """Makes the masks of a step a function of the run's seed and the step alone."""
    torch.default_generator.manual_seed(seed_of("dropout", seed, step))


def own_tokens() -> str:
    """Names this rank for tokens or features that no other rank holds."""
    return f"rank {dist.get_rank()}"


def tokens_of_experts() -> str:
    """Names the ranks that compute the same tokens with parts of the same experts."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    experts = parallel_state.get_expert_model_parallel_rank()
    copy = parallel_state.get_expert_data_parallel_rank()
    return f"stage {stage} experts {experts} copy {copy}"


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _drop(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _drop(grad, ctx.p, ctx.seed), None, None


def _drop(x: Tensor, p: float, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    kept.bernoulli_(1 - p, generator=generator)
    return x * kept / (1 - p)
