"""Adapters as PEFT folders: write one, read one, and prove that PEFT loads it completely."""

from glm5.checkpoint.adapter_check import AdapterReport, load_peft_model, verify_peft_adapter
from glm5.checkpoint.adapter_layout import LoraFactors, adapter_linears
from glm5.checkpoint.adapter_read import read_peft_adapter
from glm5.checkpoint.adapter_write import write_peft_adapter

__all__ = [
    "AdapterReport",
    "LoraFactors",
    "adapter_linears",
    "load_peft_model",
    "read_peft_adapter",
    "verify_peft_adapter",
    "write_peft_adapter",
]
