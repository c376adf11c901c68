"""Adapters for tests: a tiny model of transformers, random factors, and logits merged by hand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5.checkpoint.adapter_io import (
    LoraAdapter,
    LoraFactors,
    adapter_linears,
    verify_peft_adapter,
    write_peft_adapter,
)
from glm5.config import Glm5Config

RANK, ALPHA = 3, 5.0
NUM_EXPERTS = 5
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"

Factors = dict[str, LoraFactors]

KINDS: dict[str, Callable[[str], bool]] = {
    "all": lambda path: True,
    "attention": lambda path: ".self_attn." in path and ".indexer." not in path,
    "q_a_proj": lambda path: path.endswith(".q_a_proj"),
    "kv_b_proj": lambda path: path.endswith(".kv_b_proj"),
    "indexer": lambda path: ".indexer." in path,
    "dense": lambda path: ".mlp." in path and "experts" not in path,
    "shared_experts": lambda path: "shared_experts" in path,
    "routed_experts": lambda path: ".mlp.experts." in path,
    "expert_gate_up": lambda path: ".mlp.experts." in path and not path.endswith("down_proj"),
    "expert_down": lambda path: ".mlp.experts." in path and path.endswith("down_proj"),
    "gate_only": lambda path: path.endswith("gate_proj"),
    "up_only": lambda path: path.endswith("up_proj"),
    "one_layer": lambda path: path.startswith("model.layers.3."),
    "one_expert": lambda path: ".mlp.experts.2." in path,
    "one_linear": lambda path: path == "model.layers.2.mlp.experts.4.up_proj",
    "all_but_one_layer": lambda path: not path.startswith("model.layers.2."),
    "other_projections_in_other_layers": lambda path: (
        path.startswith("model.layers.2.mlp.experts") == path.endswith("down_proj")
        and ".mlp.experts." in path
    ),
}


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM-5.2-like model: dense and sparse, full and shared layers, non-constant norms."""
    folder = tmp_path_factory.mktemp("hf")
    build_hf(folder)
    return folder


def build_hf(folder: Path, **changes: Any) -> None:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
        "initializer_range": 0.2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    hf_config = transformers.GlmMoeDsaConfig(**(sizes | changes))
    model = transformers.GlmMoeDsaForCausalLM(hf_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "num_experts"):
        raw.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.fixture(scope="session")
def config(hf_dir: Path) -> Glm5Config:
    return Glm5Config.from_hf(hf_dir)


def make_factors(
    config: Glm5Config,
    chosen: Callable[[str], bool] = KINDS["all"],
    dtype: torch.dtype = torch.float32,
    rank: int = RANK,
    alpha: float = ALPHA,
) -> Factors:
    """Random factors, b not zero."""
    return {
        path: LoraFactors(
            (torch.randn(rank, n) / n**0.5).to(dtype),
            (0.2 * torch.randn(m, rank)).to(dtype),
            alpha / rank,
        )
        for path, (m, n) in adapter_linears(config).items()
        if chosen(path)
    }


def adapter_of(factors: Factors, modules: dict[str, Tensor] | None = None) -> LoraAdapter:
    """Per expert, where there are experts."""
    has_experts = any(".mlp.experts." in path for path in factors)
    return LoraAdapter(factors, "per_expert" if has_experts else "none", modules or {})


def write(folder: Path, adapter: Factors | LoraAdapter, config: Glm5Config) -> None:
    adapter = adapter if isinstance(adapter, LoraAdapter) else adapter_of(adapter)
    write_peft_adapter(folder, adapter, config=config, base_name="tiny")


def verify(folder: Path, hf_dir: Path, adapter: Factors | LoraAdapter) -> Any:
    adapter = adapter if isinstance(adapter, LoraAdapter) else adapter_of(adapter)
    return verify_peft_adapter(folder, hf_dir, Glm5Config.from_hf(hf_dir), adapter)


def assert_same(left: Mapping[str, LoraFactors], right: Mapping[str, LoraFactors]) -> None:
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].scale == right[path].scale, path
        for x, y in ((left[path].a, right[path].a), (left[path].b, right[path].b)):
            assert x.dtype == y.dtype and x.is_contiguous() and torch.equal(x, y), path


def logits(model: torch.nn.Module, tokens: int = 30) -> Tensor:
    ids = torch.randint(2, 64, (1, tokens), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def load_hf(hf_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()


def merged_logits(
    hf_dir: Path, factors: Mapping[str, LoraFactors], modules: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Logits of the transformers model with each delta added to its weight by hand."""
    model = load_hf(hf_dir)
    weights = model.state_dict()
    for path, pair in factors.items():
        delta = pair.scale * (pair.b.double() @ pair.a.double())
        if ".mlp.experts." in path:
            owner, expert, leaf = path.rsplit(".", 2)
            fused = "down_proj" if leaf == "down_proj" else "gate_up_proj"
            weight = weights[f"{owner}.{fused}"][int(expert)]
            if leaf != "down_proj":
                weight = weight.chunk(2)[leaf == "up_proj"]
        else:
            weight = weights[f"{path}.weight"]
        weight.add_(delta)
    for name, tensor in (modules or {}).items():
        weights[name].copy_(tensor)
    return logits(model)


def edit_settings(folder: Path, **changes: Any) -> None:
    path = folder / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
