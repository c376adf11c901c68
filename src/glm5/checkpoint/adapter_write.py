"""Write an adapter as a PEFT folder that PEFT loads completely."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.adapter_file import ADAPTER_DTYPES, WEIGHTS_FILE, write_adapter_file
from glm5.checkpoint.adapter_fused import fuse_experts
from glm5.checkpoint.adapter_layout import (
    FUSED_EXPERTS,
    LoraFactors,
    adapter_linears,
    check_paths,
    fused_weight,
    peft_keys,
    peft_targets,
    peft_weights,
    weight_shapes,
)
from glm5.checkpoint.adapter_settings import CONFIG_FILE
from glm5.checkpoint.atomic import new_folder
from glm5.config import Glm5Config
from glm5.errors import AdapterError


def write_peft_adapter(
    folder: str | Path,
    factors: Mapping[str, LoraFactors],
    *,
    rank: int,
    alpha: float,
    config: Glm5Config,
    base_name: str,
) -> None:
    """Write `factors`, by Hugging Face linear path, as a folder that PEFT loads completely.

    delta W = (alpha / rank) * b @ a with a [rank, in] and b [out, rank], all of one dtype (fp32,
    bf16 or fp16), which the file keeps. The folder describes exactly the adapted set:

    * attention and indexer linears are PEFT target_modules;
    * dense and shared-expert linears are target_parameters `<linear>.weight`, because PEFT drops
      them when they are named as modules;
    * routed experts are target_parameters `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`,
      fused over the experts of a layer. An expert, or one of gate and up, that is not in `factors`
      gets zero factors there, which leaves its weight unchanged.

    One fused matrix pair is in memory beside `factors`. The folder appears complete or not at all.
    Raises AdapterError for unknown linears (MTP layers included: transformers has none), wrong
    shapes, mixed dtypes or values that are not finite, and CheckpointError for a folder that
    already holds something.
    """
    linears = adapter_linears(config)
    _check_factors(factors, linears, rank=rank, alpha=alpha)
    weights = peft_weights(factors)
    num_experts = config.n_routed_experts
    with new_folder(folder) as staging:
        all_weights = peft_weights(linears)
        _write_config(staging, weights, all_weights, rank=rank, alpha=alpha, base_name=base_name)
        write_adapter_file(
            staging / WEIGHTS_FILE,
            _shapes(weights, linears, rank=rank, num_experts=num_experts),
            next(iter(factors.values())).a.dtype,
            _tensors(weights, factors, linears, num_experts=num_experts),
        )


def _check_factors(
    factors: Mapping[str, LoraFactors],
    linears: Mapping[str, tuple[int, int]],
    *,
    rank: int,
    alpha: float,
) -> None:
    if not factors:
        raise AdapterError("the adapter is empty", remedy="adapt at least one linear")
    if rank < 1 or not math.isfinite(alpha) or alpha <= 0:
        raise AdapterError(
            "rank and alpha are not those of an adapter",
            got=f"rank {rank}, alpha {alpha}",
            expected="rank >= 1, alpha > 0",
        )
    check_paths(factors, linears)
    dtype = next(iter(factors.values())).a.dtype
    for path, pair in factors.items():
        out_features, in_features = linears[path]
        for name, tensor, shape in (
            ("a", pair.a, (rank, in_features)),
            ("b", pair.b, (out_features, rank)),
        ):
            _check_tensor(f"{path} {name}", tensor, shape, dtype)


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise AdapterError(f"{name} has the wrong shape", got=tuple(tensor.shape), expected=shape)
    if tensor.dtype != dtype or dtype not in ADAPTER_DTYPES:
        raise AdapterError(
            f"{name} has the wrong dtype",
            got=tensor.dtype,
            expected=f"one of {ADAPTER_DTYPES}, the same for all factors",
        )
    if not torch.isfinite(tensor).all():
        raise AdapterError(f"{name} holds NaN or infinity", remedy="export an earlier checkpoint")


def _write_config(
    folder: Path,
    weights: list[str],
    all_weights: list[str],
    *,
    rank: int,
    alpha: float,
    base_name: str,
) -> None:
    modules, parameters = peft_targets(weights, all_weights)
    alpha = int(alpha) if float(alpha).is_integer() else alpha
    # A fused weight of n projections has n times the rank; n times alpha keeps alpha / rank.
    widths = {
        rf"mlp\.experts\.{name}": len(projections)
        for name, projections in FUSED_EXPERTS.items()
        if len(projections) > 1 and any(weight.endswith(f"experts.{name}") for weight in weights)
    }
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": {pattern: n * rank for pattern, n in widths.items()},
        "alpha_pattern": {pattern: n * alpha for pattern, n in widths.items()},
    }
    text = json.dumps(adapter_config, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _shapes(
    weights: list[str], linears: Mapping[str, tuple[int, int]], *, rank: int, num_experts: int
) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, key in peft_keys(weights).items():
        fused = fused_weight(weight)
        width = len(fused.projections) if fused else 1
        shapes[f"{key}.lora_A.weight"], shapes[f"{key}.lora_B.weight"] = weight_shapes(
            weight, linears, rank=width * rank, num_experts=num_experts
        )
    return shapes


def _tensors(
    weights: list[str],
    factors: Mapping[str, LoraFactors],
    linears: Mapping[str, tuple[int, int]],
    *,
    num_experts: int,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file; a fused pair is made when it is asked for."""
    for weight, key in peft_keys(weights).items():
        if fused := fused_weight(weight):
            shape = linears[fused.path(0, fused.projections[0])]
            pair = fuse_experts(fused, factors, num_experts=num_experts, shape=shape)
        else:
            pair = factors[weight.removesuffix(".weight")]
        yield f"{key}.lora_A.weight", pair.a.detach()
        yield f"{key}.lora_B.weight", pair.b.detach()
