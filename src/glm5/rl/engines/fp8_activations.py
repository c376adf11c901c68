"""Gives a `transformers` model the products of engines that serve block-scaled FP8."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from glm5.checkpoint.adapter_layout import is_mtp
from glm5.checkpoint.fp8_config import quantisable_names
from glm5.config import Glm5Config
from glm5.ops.block_scaled.quantise import quantise_rows

_EXPERTS = ".mlp.experts."
# absorbed into the attention: engines dequantise it
_EXACT = ".kv_b_proj"


def quantise_activations(model: Any, glm5: Glm5Config) -> None:
    """From now on the linears that an FP8 release quantises see their inputs through float8.

    An input is quantised by pieces of its rows, as long as a block of the weights is wide, and
    dequantised again; its product with the weights of `model` is then that of float8 with float8,
    summed in the model's dtype. `kv_b_proj` and all else stay as they are. Adapters see the exact
    input, also where PEFT adds them to a weight.
    """
    assert glm5.fp8 is not None
    piece = glm5.fp8.weight_block_size[1]
    for path in _quantised_modules(glm5):
        _watch(model.get_submodule(path), piece)


def seen_in_float8(x: Tensor, piece: int) -> Tensor:
    """x [.., n] of any floating dtype, quantised by pieces of its rows and dequantised."""
    values, scales = quantise_rows(x.reshape(-1, x.shape[-1]), piece)
    seen = values.float() * scales.repeat_interleave(piece, dim=1)[:, : x.shape[-1]]
    return seen.to(x.dtype).view_as(x)


def _quantised_modules(glm5: Glm5Config) -> list[str]:
    """Paths in `transformers`, which holds all experts of a layer in one module."""
    linears = (name.removesuffix(".weight") for name in quantisable_names(glm5))
    wanted = (path for path in linears if not is_mtp(path, glm5) and not path.endswith(_EXACT))
    return sorted({_holder(path) for path in wanted})


def _holder(path: str) -> str:
    layer, experts, _ = path.partition(_EXPERTS)
    return f"{layer}{experts}".removesuffix(".")


def _watch(module: nn.Module, piece: int) -> None:
    mode = _LinearsInFloat8(module, piece)

    def before(module: nn.Module, args: Any) -> None:
        mode.__enter__()

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        mode.__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


class _LinearsInFloat8(TorchFunctionMode):
    """Inside the forward of a linear, or of experts, which call no modules for theirs."""

    def __init__(self, module: nn.Module, piece: int) -> None:
        super().__init__()
        self._module, self._piece = module, piece

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        frozen = _without_adapter(self._module, weight)
        y = F.linear(seen_in_float8(x, self._piece), frozen)
        return y if frozen is weight else y + F.linear(x, weight - frozen)


def _without_adapter(module: nn.Module, weight: Tensor) -> Tensor:
    """The part of a parameter's original that `weight` is of the parameter as PEFT has changed it,
    or `weight` itself."""
    if not is_parametrized(module):
        return weight
    assert isinstance(module.parametrizations, nn.ModuleDict)
    for name, parametrization in module.parametrizations.items():
        changed, original = getattr(module, name), parametrization.original
        assert isinstance(original, Tensor)
        if changed.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            assert changed.stride() == original.stride() and not changed.storage_offset()
            return original.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    return weight
