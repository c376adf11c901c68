"""Short ways through Megatron-Bridge to a model on the CPU."""

from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

import glm5.integrations.megatron_bridge
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.integrations.megatron_bridge import GLM5ModelProvider

assert glm5.integrations.megatron_bridge

TARGETS = (
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
)
INDEXER_TARGETS = ("linear_wq_b", "linear_wk", "linear_weights_proj")


def provider_of(folder: Path, **fields: Any) -> GLM5ModelProvider:
    """The provider of a checkpoint with some fields set, ready to build from."""
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


def bridged(
    folder: Path, *, lora: LoRA | None = None, data_parallel: bool = False, **fields: Any
) -> tuple[Any, list[Any]]:
    """(AutoBridge, this rank's stages with their weights), as a training script makes them."""
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider()
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    if lora is not None:
        provider.register_pre_wrap_hook(lora)
    model = provider.provide_distributed_model(
        wrap_with_ddp=data_parallel,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        use_cpu_initialization=True,
    )
    return bridge, model


def exported(bridge: Any, model: list[Any], **options: Any) -> dict[str, Tensor]:
    """What export_hf_weights gives."""
    return dict(bridge.export_hf_weights(model, cpu=True, show_progress=False, **options))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder."""
    reader = SafetensorsReader(folder)
    return {name: reader.read(name) for name in reader.names()}


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and values."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def make_lora(**options: Any) -> LoRA:
    """LoRA on every linear of the layers but the indexer's."""
    return LoRA(**({"target_modules": list(TARGETS), "dim": 4, "alpha": 8} | options))


def randomise(model: list[Any], seed: int = 0) -> None:
    """Gives every B values, without which A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in model:
        for name, factor in chunk.named_parameters():
            if ".linear_out." in name:
                nn.init.normal_(factor, std=0.1, generator=generator)
