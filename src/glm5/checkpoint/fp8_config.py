"""The config.json of a checkpoint whose linears are block-scaled float8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.checkpoint.hf_layout import hf_tensors
from glm5.config import Glm5Config


def with_fp8(raw: Mapping[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """A config.json of a model in its dtype, as one that is quantised in blocks of that size.

    The modules that keep their dtype are listed by the names that their tensors have.
    """
    return {
        **raw,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": _kept_modules(Glm5Config.from_hf_dict(raw)),
            "quant_method": "fp8",
            "weight_block_size": list(block),
        },
    }


def quantisable_names(glm5: Glm5Config) -> set[str]:
    """The tensors that an FP8 release stores as float8 with scales."""
    return {name for name, tensor in hf_tensors(glm5).items() if tensor.quantisable}


def _kept_modules(glm5: Glm5Config) -> list[str]:
    tensors = hf_tensors(glm5)
    kept = (name.rpartition(".")[0] for name, tensor in tensors.items() if not tensor.quantisable)
    return sorted(set(kept))
