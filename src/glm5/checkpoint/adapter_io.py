"""Adapters on disk: PEFT folders and those that engines serve; write, read and check them."""

from glm5.checkpoint.adapter import FactorSpec, LazyFactors, LoraAdapter, LoraFactors
from glm5.checkpoint.adapter_check import (
    AdapterReport,
    check_loaded_tensors,
    verify_peft_adapter,
)
from glm5.checkpoint.adapter_compare import compare_adapters
from glm5.checkpoint.adapter_engines import Consumer, Engine
from glm5.checkpoint.adapter_layout import adapter_linears, module_tensors
from glm5.checkpoint.adapter_read import read_adapter
from glm5.checkpoint.adapter_serving import ServingReport, write_serving_adapter
from glm5.checkpoint.adapter_serving_check import check_serving_adapter
from glm5.checkpoint.adapter_write import write_peft_adapter
from glm5.checkpoint.peft_model import attach_adapter, detach_adapter, load_peft_model

__all__ = [
    "AdapterReport",
    "Consumer",
    "Engine",
    "FactorSpec",
    "LazyFactors",
    "LoraAdapter",
    "LoraFactors",
    "ServingReport",
    "adapter_linears",
    "attach_adapter",
    "check_loaded_tensors",
    "check_serving_adapter",
    "compare_adapters",
    "detach_adapter",
    "load_peft_model",
    "module_tensors",
    "read_adapter",
    "verify_peft_adapter",
    "write_peft_adapter",
    "write_serving_adapter",
]
