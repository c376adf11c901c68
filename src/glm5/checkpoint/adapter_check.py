"""Prove that transformers + PEFT apply an adapter folder completely and exactly."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from glm5.checkpoint.adapter import LoraAdapter, LoraFactors
from glm5.checkpoint.adapter_file import WEIGHTS_FILE
from glm5.checkpoint.adapter_layout import fused_weight, peft_weights
from glm5.checkpoint.names import summarise
from glm5.checkpoint.peft_model import ADAPTER_NAME, load_peft_model
from glm5.config import Glm5Config
from glm5.errors import AdapterError

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What verify_peft_adapter compared."""

    num_tensors: int
    """Tensors of the file, each found in the PEFT model with equal values."""
    num_linears: int
    """Hugging Face linears whose delta was compared."""
    num_weights: int
    """Weights that PEFT wraps; the experts of a layer share two."""
    max_error: float
    """Largest |PEFT's delta - scale * b @ a| of one element."""
    max_error_over_bound: float
    """The same over its fp32 rounding bound; at most 1."""


def verify_peft_adapter(
    folder: str | Path,
    hf_dir: str | Path,
    glm5: Glm5Config,
    adapter: LoraAdapter,
    *,
    device: str | torch.device = "cpu",
) -> AdapterReport:
    """Load the folder on the model in `hf_dir` with PEFT, in fp32, and compare it with `adapter`.

    Every tensor of the file must be in the PEFT model with equal values and the PEFT model must
    have no other; the wrapped weights must be those of the adapter; every wrapped weight's delta
    must be scale * b @ a (a [rank, in], b [out, rank]) up to fp32 rounding, and up to the one
    rounding of b where experts that PEFT fuses have several scales; and the whole modules that
    PEFT computes with must be the adapter's.

    Raises AdapterError naming what PEFT lost, added or changed, or when peft is not installed.
    """
    model = load_peft_model(folder, hf_dir, glm5, device=device)
    num_tensors = check_loaded_tensors(model, folder)
    _check_modules(model, adapter.modules)
    factors = adapter.factors
    wrapped = dict(_wrapped_weights(model))
    _check_weights(set(wrapped), set(peft_weights(factors)))
    worst_error = worst_ratio = 0.0
    unseen = set(factors)
    for weight, layer in wrapped.items():
        delta = layer.get_delta_weight(ADAPTER_NAME).detach()
        for path, part in _linear_deltas(weight, delta):
            error, ratio = _compare(path, part, factors.get(path), layer.scaling[ADAPTER_NAME])
            worst_error, worst_ratio = max(worst_error, error), max(worst_ratio, ratio)
            unseen.discard(path)
    if unseen:
        raise AdapterError("PEFT's model lacks linears of the adapter", got=summarise(unseen))
    return AdapterReport(num_tensors, len(factors), len(wrapped), worst_error, worst_ratio)


def check_loaded_tensors(model: "PeftModel", folder: str | Path) -> int:
    """How many tensors the folder has; raises AdapterError unless PEFT took each of them as it is.

    PEFT itself drops what it does not know, such as the experts of a folder for an engine.
    """
    held = {
        name.replace(f".{ADAPTER_NAME}.", "."): tensor
        for name, tensor in model.named_parameters()
        if ".lora_" in name
    }
    with safe_open(Path(folder) / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
        saved = {name for name in names if ".lora_" in name}
        for what, wrong in (("does not load", saved - held.keys()), ("adds", held.keys() - saved)):
            if wrong:
                raise AdapterError(f"PEFT {what} adapter tensors", got=summarise(wrong))
        changed = [
            name for name in sorted(saved) if not _same_values(held[name], file.get_tensor(name))
        ]
    if changed:
        raise AdapterError("PEFT holds other values than the file", got=summarise(changed))
    return len(names)


def _check_modules(model: "PeftModel", modules: Mapping[str, Tensor]) -> None:
    """What PEFT computes with instead of a module of the base is exactly what was saved."""
    from peft.utils.other import ModulesToSaveWrapper

    base = model.get_base_model()
    wrapped = {n: m for n, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    expected = {name.rpartition(".")[0] for name in modules}
    for what, names in (
        ("does not load modules", expected - wrapped.keys()),
        ("adds modules", wrapped.keys() - expected),
    ):
        if names:
            raise AdapterError(f"PEFT {what}", got=summarise(names))
    for name, tensor in modules.items():
        module, _, leaf = name.rpartition(".")
        held = getattr(wrapped[module].modules_to_save[ADAPTER_NAME], leaf)
        if not _same_values(held, tensor):
            raise AdapterError("PEFT holds another value than the adapter", got=name)


def _same_values(held: Tensor, saved: Tensor) -> bool:
    return torch.equal(held.detach().cpu(), saved.cpu().to(held.dtype))


def _wrapped_weights(model: "PeftModel") -> Iterator[tuple[str, Any]]:
    """(weight name as in peft_weights, PEFT layer) of everything that PEFT wraps."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            path = name.replace(".base_layer", "")
            yield (
                (f"{path}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else path),
                layer,
            )


def _check_weights(wrapped: set[str], expected: set[str]) -> None:
    for what, names in (("left out", expected - wrapped), ("added", wrapped - expected)):
        if names:
            raise AdapterError(
                f"PEFT {what} weights",
                got=summarise(names),
                expected="exactly the weights of the adapter",
                remedy="write the folder with write_peft_adapter",
            )


def _linear_deltas(weight: str, delta: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face path, delta [out, in]) of each linear inside the wrapped weight."""
    fused = fused_weight(weight)
    if fused is None:
        yield weight.removesuffix(".weight"), delta
        return
    for expert, rows in enumerate(delta):
        parts = rows.chunk(len(fused.projections))
        for projection, part in zip(fused.projections, parts, strict=True):
            yield fused.path(expert, projection), part


def _compare(
    path: str, delta: Tensor, pair: LoraFactors | None, scaling: float
) -> tuple[float, float]:
    """(largest error, largest error over its bound) of one linear's delta [out, in].

    The bound of an fp32 product over `rank` terms and one scaling, whatever their order:
    (rank + 2) * eps * scale * |b| @ |a|; N. Higham, Accuracy and Stability, section 3.5. Where
    PEFT's `scaling` is another one, b was rescaled and rounded to its dtype: eps / 2 of that more.
    """
    if pair is None:
        if delta.any():
            raise AdapterError(f"PEFT changes {path}, which the adapter leaves alone")
        return 0.0, 0.0
    a, b = (tensor.detach().to(delta.device, torch.float64) for tensor in (pair.a, pair.b))
    error = (delta.double() - pair.scale * (b @ a)).abs()
    eps = (a.shape[0] + 2) * torch.finfo(torch.float32).eps
    if not math.isclose(scaling, pair.scale, rel_tol=1e-12):
        eps += torch.finfo(pair.b.dtype).eps / 2
    bound = eps * pair.scale * (b.abs() @ a.abs())
    ratio = torch.where(error == 0, 0.0, error / bound)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if not worst <= 1:
        raise AdapterError(
            f"PEFT applies another delta to {path}",
            got=f"largest difference {float(error.max()):.3e}",
            expected=f"scale * b @ a with scale = {pair.scale}",
            remedy="write the folder with write_peft_adapter from these factors",
        )
    return float(error.max()), worst
