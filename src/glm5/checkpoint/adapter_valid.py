"""Whether an adapter in memory fits a model, before anything is written."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from glm5.checkpoint.adapter import (
    FactorSpec,
    LoraAdapter,
    LoraFactors,
    factor_specs,
    is_expert,
)
from glm5.checkpoint.adapter_file import ADAPTER_DTYPES
from glm5.checkpoint.adapter_layout import module_tensors
from glm5.checkpoint.names import summarise
from glm5.config import Glm5Config
from glm5.errors import AdapterError

Shape = tuple[int, int]


def check_adapter(
    adapter: LoraAdapter, linears: Mapping[str, Shape], config: Glm5Config
) -> Mapping[str, FactorSpec]:
    """Check all that is known without the factors' values; returns their specs.

    Raises AdapterError for an empty adapter, unknown linears or modules (MTP layers included:
    neither transformers nor an engine builds them with adapters), mixed dtypes, a rank or scale
    that is none, and an expert_lora that the paths contradict.
    """
    specs = factor_specs(adapter.factors)
    if not specs:
        raise AdapterError("the adapter is empty", remedy="adapt at least one linear")
    check_paths(specs, linears)
    if any(is_expert(path) for path in specs) == (adapter.expert_lora == "none"):
        raise AdapterError(
            "expert_lora contradicts the adapted linears",
            got=f'expert_lora = "{adapter.expert_lora}"',
            expected='"none" exactly where no routed expert is adapted',
        )
    first = next(iter(specs.values())).dtype
    for path, spec in specs.items():
        if spec.rank < 1 or not math.isfinite(spec.scale) or spec.scale <= 0:
            raise AdapterError(
                f"rank and scale of {path} are not those of an adapter",
                got=f"rank {spec.rank}, scale {spec.scale}",
                expected="rank >= 1, a finite scale > 0",
            )
        if spec.dtype != first or first not in ADAPTER_DTYPES:
            raise AdapterError(
                f"{path} has the wrong dtype",
                got=spec.dtype,
                expected=f"one of {ADAPTER_DTYPES}, the same for all factors",
            )
    if adapter.modules:
        _check_modules(adapter.modules, config)
    return specs


def check_paths(paths: Collection[str], linears: Mapping[str, Shape]) -> None:
    """Raise AdapterError when a path is no linear of this model that an adapter may sit on."""
    unknown = [path for path in paths if path not in linears]
    if unknown:
        raise AdapterError(
            "the adapter names linears that this model does not have",
            got=summarise(unknown),
            expected=f"Hugging Face paths such as {next(iter(linears))}",
            remedy="adapt layers below num_hidden_layers; IndexShare layers have no indexer",
        )


def checked_pair(path: str, pair: LoraFactors, spec: FactorSpec, shape: Shape) -> LoraFactors:
    """The pair itself. `shape` is (out, in) of the linear.

    Raises AdapterError for wrong shapes, another spec than was told, and values that are not
    finite.
    """
    out_features, in_features = shape
    for name, tensor, expected in (
        ("a", pair.a, (spec.rank, in_features)),
        ("b", pair.b, (out_features, spec.rank)),
    ):
        if tuple(tensor.shape) != expected:
            raise AdapterError(
                f"{path} {name} has the wrong shape", got=tuple(tensor.shape), expected=expected
            )
        if tensor.dtype != spec.dtype:
            raise AdapterError(
                f"{path} {name} has the wrong dtype", got=tensor.dtype, expected=spec.dtype
            )
        check_finite(f"{path} {name}", tensor)
    assert pair.scale == spec.scale, f"{path}: scale {pair.scale}, told {spec.scale}"
    return pair


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise AdapterError for NaN or infinity."""
    # NaN is both the least and the largest of any values that hold one
    if not torch.isfinite(torch.stack(tensor.detach().aminmax())).all():
        raise AdapterError(f"{name} holds NaN or infinity", remedy="export an earlier checkpoint")


def _check_modules(modules: Mapping[str, Tensor], config: Glm5Config) -> None:
    known = module_tensors(config)
    for name, tensor in modules.items():
        if name not in known:
            raise AdapterError(
                f"{name} cannot be saved beside an adapter",
                expected="router, norm, embedding or lm_head tensors of the decoder",
                remedy="adapt linears by factors; leave the MTP layer out",
            )
        if tuple(tensor.shape) != known[name] or tensor.dtype not in ADAPTER_DTYPES:
            raise AdapterError(
                f"{name} does not fit this model",
                got=f"{tuple(tensor.shape)} {tensor.dtype}",
                expected=f"{known[name]}, one of {ADAPTER_DTYPES}",
            )
        check_finite(name, tensor)
    modules_of = {name: name.rpartition(".")[0] for name in known}
    wanted = {modules_of[name] for name in modules}
    lacking = [n for n, module in modules_of.items() if module in wanted and n not in modules]
    if lacking:
        raise AdapterError(
            "modules that are saved beside an adapter are incomplete",
            got=f"without {summarise(lacking)}",
            expected="every tensor of the module: PEFT loads all or none",
            remedy="add the tensors of the base that did not train",
        )
