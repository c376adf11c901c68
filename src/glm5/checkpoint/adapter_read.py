"""Read a PEFT folder, written by glm5 or by PEFT itself, into one pair of factors per linear."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch.nn.functional import pad

from glm5.checkpoint.adapter_file import ADAPTER_DTYPES, WEIGHTS_FILE
from glm5.checkpoint.adapter_fused import is_block_diagonal, split_experts
from glm5.checkpoint.adapter_layout import (
    LoraFactors,
    adapter_linears,
    fused_weight,
    peft_keys,
    weight_shapes,
)
from glm5.checkpoint.adapter_settings import AdapterSettings
from glm5.checkpoint.names import summarise
from glm5.config import Glm5Config
from glm5.errors import AdapterError


class _Scaled(NamedTuple):
    """Factors of one linear with the rank and alpha of the weight that they came from."""

    factors: LoraFactors
    rank: int
    alpha: float


def read_peft_adapter(
    folder: str | Path, config: Glm5Config
) -> tuple[dict[str, LoraFactors], int, float]:
    """Read (factors by Hugging Face linear path, rank, alpha): delta W = (alpha / rank) * b @ a.

    a [rank, in] and b [out, rank], on the CPU, in the file's dtype. The inverse of
    `write_peft_adapter`, bitwise; linears with all-zero factors inside fused experts are left
    out. Of a folder that PEFT trained, a fused gate and up share one a: both get it. Where ranks
    differ but alpha / rank does not, smaller ones are padded with zeros to the largest.

    Raises AdapterError for a folder that is incomplete, not of this model, not safetensors
    (nothing is unpickled), or more than plain LoRA: DoRA, biases, modules_to_save, and the like.
    """
    folder = Path(folder)
    settings = AdapterSettings.read(folder)
    linears = adapter_linears(config)
    keys = peft_keys(settings.weights(linears))
    entries: dict[str, _Scaled] = {}
    with _open_weights(folder) as file:
        _check_keys(folder, set(file.keys()), keys)
        for weight, key in keys.items():
            rank = settings.rank(weight)
            shapes = weight_shapes(weight, linears, rank=rank, num_experts=config.n_routed_experts)
            entry = _Scaled(_read_pair(file, key, shapes), rank, settings.alpha(weight))
            entries |= _split(weight, entry, base_rank=settings.r, config=config)
    return _one_rank(folder, entries)


@contextmanager
def _open_weights(folder: Path) -> Iterator[Any]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterError(
            f"{path} is missing",
            got=", ".join(sorted(p.name for p in folder.iterdir())),
            expected="weights as safetensors; pickled adapter_model.bin is never loaded",
            remedy="save the adapter again with safe_serialization=True",
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise AdapterError(f"{path} is damaged", got=error) from error


def _check_keys(folder: Path, found: set[str], keys: Mapping[str, str]) -> None:
    expected = {f"{key}.lora_{x}.weight" for key in keys.values() for x in "AB"}
    for what, names in (
        ("lacks tensors that its targets ask for", expected - found),
        ("holds tensors that belong to no target", found - expected),
    ):
        if names:
            raise AdapterError(
                f"{folder / WEIGHTS_FILE} {what}",
                got=summarise(names),
                expected="lora_A and lora_B of each targeted linear of this model",
                remedy="use the adapter_config.json and the base model that belong to the file",
            )


def _read_pair(file: Any, key: str, shapes: tuple[tuple[int, int], tuple[int, int]]) -> LoraFactors:
    tensors = []
    for name, shape in zip((f"{key}.lora_A.weight", f"{key}.lora_B.weight"), shapes, strict=True):
        tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in ADAPTER_DTYPES:
            raise AdapterError(
                f"{name} does not fit this model",
                got=f"{tuple(tensor.shape)} {tensor.dtype}",
                expected=f"{shape}, one of {ADAPTER_DTYPES}",
            )
        tensors.append(tensor)
    return LoraFactors(*tensors)


def _split(
    weight: str, entry: _Scaled, *, base_rank: int, config: Glm5Config
) -> dict[str, _Scaled]:
    """One entry per Hugging Face linear that the weight holds."""
    fused = fused_weight(weight)
    if fused is None:
        return {weight.removesuffix(".weight"): entry}
    n, num_experts = len(fused.projections), config.n_routed_experts
    split_rank = entry.rank == n * base_rank and is_block_diagonal(
        fused, entry.factors, num_experts=num_experts
    )
    parts = split_experts(fused, entry.factors, num_experts=num_experts, split_rank=split_rank)
    share = n if split_rank else 1
    return {
        path: _Scaled(pair, entry.rank // share, entry.alpha / share)
        for path, pair in parts.items()
    }


def _one_rank(
    folder: Path, entries: Mapping[str, _Scaled]
) -> tuple[dict[str, LoraFactors], int, float]:
    """Bring all factors to the largest rank by zero padding, which keeps every delta exactly."""
    if not entries:
        raise AdapterError(f"{folder} holds zeros only", remedy="export a trained adapter")
    scalings = {entry.alpha / entry.rank for entry in entries.values()}
    if len(scalings) != 1:
        raise AdapterError(
            f"{folder} has linears with different alpha / rank",
            got=sorted(scalings),
            expected="one scaling for the whole adapter",
            remedy="remove alpha_pattern or scale the weights to one alpha / rank",
        )
    rank, alpha = max((entry.rank, entry.alpha) for entry in entries.values())
    factors = {}
    for path, (pair, own_rank, _) in entries.items():
        missing = rank - own_rank
        factors[path] = (
            LoraFactors(pad(pair.a, (0, 0, 0, missing)), pad(pair.b, (0, missing)))
            if missing
            else pair
        )
    return factors, rank, alpha
