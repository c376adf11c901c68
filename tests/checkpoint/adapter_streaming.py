"""Run as a program in an empty folder: prints, as JSON, what writing, reading and converting costs.

"peak": MiB above the start, for an adapter of ADAPTER_MIB in LAYERS layers. "seconds": CPU time,
for one of as many tensors as GLM-5.2's.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from glm5.checkpoint.adapter_convert import convert_adapter
from glm5.checkpoint.adapter_io import (
    FactorSpec,
    LazyFactors,
    LoraAdapter,
    LoraFactors,
    adapter_linears,
    read_adapter,
    write_serving_adapter,
)
from glm5.config import Glm5Config
from glm5.plan.models import read_model
from tests.checkpoint.streaming import peak_mib

LAYERS, EXPERTS, RANK = 16, 16, 32
MANY_TENSORS = 115_200


def small(layers: int, experts: int, width: int) -> Glm5Config:
    """Like GLM-5, with so many layers, all of them sparse."""
    raw: dict[str, Any] = read_model("GLM-5")[1].to_hf_dict()
    raw |= {
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "n_routed_experts": experts,
        "hidden_size": width,
        "moe_intermediate_size": width,
        "num_nextn_predict_layers": 0,
    }
    return Glm5Config.from_hf_dict(raw)


def adapter_on_experts(config: Glm5Config, rank: int) -> LoraAdapter:
    """Made when it is asked for."""
    linears = {p: s for p, s in adapter_linears(config).items() if ".mlp.experts." in p}
    specs = dict.fromkeys(linears, FactorSpec(rank, 2.0, torch.float32))

    def make(path: str) -> LoraFactors:
        out_features, in_features = linears[path]
        a = torch.full((rank, in_features), float(len(path)))
        return LoraFactors(a, torch.full((out_features, rank), 0.5), 2.0)

    return LoraAdapter(LazyFactors(specs, make), "per_expert")


def read_all(folder: str, config: Glm5Config, *, keep: bool = False) -> None:
    pairs = iter(read_adapter(folder, config).factors.values())
    kept = [pair for pair in pairs if keep]
    del kept


def peaks() -> dict[str, float]:
    config = small(LAYERS, EXPERTS, 512)
    adapter = adapter_on_experts(config, RANK)

    def write(folder: str) -> None:
        write_serving_adapter(folder, adapter, "sglang", config=config, base_name="x")

    def convert(source: str, target: str, to: Any) -> None:
        convert_adapter(source, target, to, config, base_name="x")

    write("warm up")
    return {
        "write": peak_mib(lambda: write("sglang")),
        "read": peak_mib(lambda: read_all("sglang", config)),
        "read and keep": peak_mib(lambda: read_all("sglang", config, keep=True)),
        "sglang to peft": peak_mib(lambda: convert("sglang", "peft", "peft")),
        "peft to vllm": peak_mib(lambda: convert("peft", "vllm", "vllm")),
    }


def seconds() -> dict[str, float]:
    config = small(75, 256, 8)
    adapter = adapter_on_experts(config, 1)
    assert 2 * len(adapter.factors) == MANY_TENSORS

    def write() -> None:
        write_serving_adapter("many", adapter, "vllm", config=config, base_name="x")

    return {"write": _cpu(write), "read": _cpu(lambda: read_all("many", config))}


def _cpu(function: Callable[[], None]) -> float:
    before = time.process_time()
    function()
    return time.process_time() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {"peak": peaks(), "seconds": seconds()}
    found["peak"]["size"] = Path("sglang/adapter_model.safetensors").stat().st_size / 2**20
    print(json.dumps(found))
