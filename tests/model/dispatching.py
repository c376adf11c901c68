"""One layer of a tiny model with the dispatcher that a test names, run forward and backward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.model.dispatcher import Glm5TokenDispatcher
from glm5.model.moe import Glm5MoELayer
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from tests.tiny_models import gradients, modules_of

Make = Callable[..., Any]
Results = dict[str, Tensor]


def moe_layer(folder: Path, make: Make, dtype: torch.dtype = torch.float32) -> Glm5MoELayer:
    """The model's first layer with experts."""
    _, layer = next(modules_of(load_model(folder), Glm5MoELayer))
    layer.token_dispatcher = dispatcher(layer, make)
    return layer.to(dtype).train()


def dispatcher(layer: Glm5MoELayer, make: Make) -> Any:
    """A new one, of that class."""
    return make(
        layer.num_local_experts,
        layer.local_expert_indices,
        config=layer.config,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def run(layer: Glm5MoELayer, rows: tuple[int, ...], seed: int = 0) -> Results:
    """Output and all gradients, the input's and the router's among them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = layer.experts.linear_fc1.weight.dtype
    x = torch.randn(*rows, layer.config.hidden_size, generator=generator).to(dtype)
    x.requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, _ = layer(x)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    assert x.grad is not None
    return {"output": y.detach(), "x": x.grad, **gradients(layer)}


def ours_and_megatrons(folder: Path, layout: Layout) -> tuple[Results, Results]:
    """Of one rank, whose tokens are its own."""
    ensure_distributed(default_device(), layout)
    layers = [moe_layer(folder, m) for m in (Glm5TokenDispatcher, MoEAlltoAllTokenDispatcher)]
    # as many tokens on every rank only where ranks share the width of an expert
    rank, extra = dist.get_rank(), 0 if layout.etp > 1 else 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", _as_from_a_gpu)
        ours, theirs = (run(layer, (23 + extra * rank, 1), seed=rank) for layer in layers)
    return ours, theirs


def _as_from_a_gpu(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron hands numbers to the collectives only if they were on a GPU."""
    del record_stream
    return x.numpy() if as_numpy and isinstance(x, Tensor) else x
