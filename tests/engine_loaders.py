"""How the loaders of SGLang 0.5.23 and vLLM 0.33 lay an adapter folder out, for GLM-5.

Models of what those loaders do with names and shapes, written from their documented behaviour and
without this project's writers or checks: the deltas they return are what the engine would add to
the weights. What an engine fills with zeros in silence, these fill, too.
"""

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5.config import Glm5Config

Deltas = dict[str, Tensor]

_SIDE = re.compile(r"^(?:base_model\.model\.)?(.*)\.lora_(A|B)\.weight$")
_ALIASES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
_SERVED = {
    "sglang": (*_ATTENTION, "kv_b_proj", "wq_b", "wk", "weights_proj"),
    "vllm": (*_ATTENTION, "wq_b"),
}
_MLP = ("gate_proj", "up_proj", "down_proj")


class RejectedError(Exception):
    """The engine would not start, or would crash, with this adapter."""


def load(folder: Path, engine: str, config: Glm5Config) -> Deltas:
    """Hugging Face path -> delta [out, in] of every linear that the engine has a buffer for."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    rank, alpha = settings["r"], settings["lora_alpha"]
    # SGLang knows no rsLoRA
    stabilised = engine == "vllm" and settings.get("use_rslora", False)
    scaling = alpha / (math.sqrt(rank) if stabilised else rank)
    targets = set(settings["target_modules"])
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = _SIDE.match(name)
        if match is None:
            raise RejectedError(f"no factor: {name}")
        if engine == "vllm" and not name.startswith("base_model.model."):
            raise RejectedError(f"no prefix: {name}")
        leaf = match[1].split(".")[-1]
        if _ALIASES.get(leaf, leaf) not in targets or leaf in ("experts", "base_layer"):
            raise RejectedError(f"not targeted: {name}")
        modules.setdefault(match[1], {})[match[2]] = tensor
    experts = {path: sides for path, sides in modules.items() if ".mlp.experts." in path}
    plain = {path: sides for path, sides in modules.items() if path not in experts}
    deltas = _plain(plain, engine, rank, config)
    layers = {path.split(".mlp.experts.")[0] for path in experts}
    for layer in sorted(layers):
        own = {p: sides for p, sides in experts.items() if p.startswith(f"{layer}.mlp.experts.")}
        deltas |= _experts(f"{layer}.mlp.experts", own, engine, rank, config)
    return {path: scaling * delta for path, delta in deltas.items()}


def _plain(modules: dict[str, dict[str, Tensor]], engine: str, rank: int, c: Glm5Config) -> Deltas:
    sizes = {
        "q_a_proj": (c.q_lora_rank, c.hidden_size),
        "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
    }
    deltas: Deltas = {}
    for path, sides in modules.items():
        parent, _, leaf = path.rpartition(".")
        if leaf not in (*_SERVED[engine], *_MLP):
            raise RejectedError(f"{engine} has no buffer for {path}")
        if leaf in sizes:
            # one fused linear: its A holds both, its B is [q_lora_rank + kv rows, rank]
            both = [modules.get(f"{parent}.{name}") for name in sizes]
            if None in both:
                raise RejectedError(f"half of fused_qkv_a_proj_with_mqa at {parent}")
        if leaf == "up_proj" and f"{parent}.gate_proj" not in modules:
            raise RejectedError(f"orphan {path}")
        deltas[path] = _delta(sides["A"], sides["B"], rank, sizes.get(leaf))
    return deltas


def _experts(
    owner: str, modules: dict[str, dict[str, Tensor]], engine: str, rank: int, c: Glm5Config
) -> Deltas:
    names = {path.removeprefix(f"{owner}.") for path in modules}
    together = {name for name in names if "." not in name}
    if together and together != names:
        raise RejectedError(f"both expert formats at {owner}")
    if together:
        return _together(owner, modules, engine, rank, c)
    deltas: Deltas = {}
    for expert in range(c.n_routed_experts):
        for leaf in _MLP:
            sides = modules.get(f"{owner}.{expert}.{leaf}")
            if sides is None and engine == "vllm":
                raise RejectedError(f"pack_moe: no {leaf} of expert {expert} at {owner}")
            if sides is not None:
                shape = _expert_shape(leaf, c)
                deltas[f"{owner}.{expert}.{leaf}"] = _delta(sides["A"], sides["B"], rank, shape)
    return deltas


def _together(
    owner: str, modules: dict[str, dict[str, Tensor]], engine: str, rank: int, c: Glm5Config
) -> Deltas:
    deltas: Deltas = {}
    for short, leaf in _ALIASES.items():
        sides = modules.get(f"{owner}.{short}")
        if sides is None and engine == "vllm":
            raise RejectedError(f"no {short} at {owner}")
        if sides is None:
            continue
        a, b = sides["A"], sides["B"]
        shared = b if leaf == "down_proj" else a
        if a.ndim != 3 or b.ndim != 3 or len(shared) != 1:
            raise RejectedError(f"outer factor of {owner}.{short} is not shared")
        for expert in range(c.n_routed_experts):
            own_a, own_b = (t[0] if len(t) == 1 else t[expert] for t in (a, b))
            delta = _delta(own_a, own_b, rank, _expert_shape(leaf, c))
            deltas[f"{owner}.{expert}.{leaf}"] = delta
    return deltas


def _expert_shape(leaf: str, c: Glm5Config) -> tuple[int, int]:
    shape = (c.moe_intermediate_size, c.hidden_size)
    return shape[::-1] if leaf == "down_proj" else shape


def _delta(a: Tensor, b: Tensor, rank: int, shape: tuple[int, int] | None) -> Tensor:
    """Through a buffer of the one rank that the engine knows."""
    if a.shape[0] != rank or b.shape[1] != rank:
        raise RejectedError(f"rank {a.shape[0]}, {b.shape[1]} in a buffer of {rank}")
    if shape is not None and (b.shape[0], a.shape[1]) != shape:
        raise RejectedError(f"{tuple(b.shape)} x {tuple(a.shape)} in a buffer of {shape}")
    return b.to(torch.float64) @ a.to(torch.float64)
