"""How each side of the gap multiplies the linears that an FP8 release quantises."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from glm5.config import Glm5Config
from glm5.config_file import CONFIG_NAME
from glm5.errors import ConfigError

Products = Literal["exact", "fp8", "other", "untold"]
"""exact: in the model's dtype, inputs as they come. fp8: block-scaled float8 weights with inputs
that are quantised by pieces of their rows, kv_b_proj dequantised. other: another quantisation.
untold: a server that does not say."""

_REMEDIES: dict[tuple[Products, Products], str] = {
    ("exact", "fp8"): "the rounding of the engine's inputs is in the gap, and rl.is_high bounds "
    'what it does; with model.base_weights = "fp8" and model.fp8_compute = true the trainer '
    "rounds, too, which helps where nothing else differs (docs/rl.md)",
    ("fp8", "exact"): "the rounding of the trainer's inputs is in the gap; leave model.fp8_compute "
    "out, or have the engine do the same: serve the FP8 release, or rollout.fp8_activations = true",
    ("exact", "untold"): "if it serves an FP8 release, see docs/rl.md",
    ("fp8", "untold"): "if it serves no FP8 release, leave model.fp8_compute out",
}
_OTHER = (
    "the engine's own quantisation is in the gap; serve an FP8 release of 128x128 blocks, or "
    "weights that are not quantised"
)


def describe_products(trainer: Products, engine: Products) -> str:
    """A line for the start of a run, with a remedy where the two sides differ."""
    line = f"products of linears: {trainer} in the trainer, {engine} in the engine"
    remedy = _OTHER if engine == "other" else _REMEDIES.get((trainer, engine))
    return line if remedy is None else f"{line}: {remedy}"


def product_labels(trainer: Products, engine: Products) -> dict[str, str]:
    """For the lines of the metrics: between which two the gap is."""
    return {"gap_trainer_products": trainer, "gap_engine_products": engine}


def serves_fp8(model: object) -> bool | None:
    """Whether what a server calls its model is a block-scaled FP8 release; None if that cannot be
    seen from here. model: as the server tells it, a folder, or the id of a repository, which is
    looked for among the downloaded ones alone."""
    folder = _folder(model) if isinstance(model, str) and model else None
    if folder is None:
        return None
    try:
        return Glm5Config.from_hf(folder).fp8 is not None
    except ConfigError:
        return None


def _folder(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, CONFIG_NAME)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
