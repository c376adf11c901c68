"""Tiny checkpoints on disk, and short ways to run the models made from them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TinyFolder = Callable[..., Path]
VARIANTS = ("5", "5.1", "5.2")
# Divides hardly any size of a tiny model, nor of a rank's part of one.
SMALL_BLOCK = (12, 20)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """tiny_folder(variant, **options of write_tiny) -> a folder that all tests share."""
    from glm5.checkpoint.tiny import write_tiny

    made: dict[Any, Path] = {}

    def folder(variant: str, **options: Any) -> Path:
        key = (variant, *sorted(options.items()))
        if key not in made:
            made[key] = write_tiny(tmp_path_factory.mktemp("tiny") / variant, variant, **options)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def fp8_folder(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """fp8_folder(variant, **options of write_tiny) -> a shared folder in float8, small blocks."""
    made: dict[Any, Path] = {}

    def folder(variant: str, **options: Any) -> Path:
        key = (variant, *sorted(options.items()))
        if key not in made:
            source, target = tiny_folder(variant, **options), tmp_path_factory.mktemp("fp8")
            made[key] = write_fp8(source, target / variant)
        return made[key]

    return folder


def write_fp8(source: Path, target: Path, block: tuple[int, int] = SMALL_BLOCK) -> Path:
    """A copy with float8 weights, many blocks each, of magnitudes that lie far apart."""
    from glm5.checkpoint.fp8 import SCALE_SUFFIX
    from glm5.checkpoint.hf_layout import hf_tensors
    from glm5.config import Glm5Config
    from glm5.ops.block_scaled import quantise
    from tests.hf_folders import rewrite

    layout = hf_tensors(Glm5Config.from_hf(source))

    def change(tensors: dict[str, Tensor]) -> None:
        for number, name in enumerate([n for n in layout if layout[n].quantisable]):
            weight = varied(tensors[name].float(), block, seed=number)
            scaled = quantise(weight, block)
            tensors[name], tensors[name + SCALE_SUFFIX] = scaled.values, scaled.scales

    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    return rewrite(source, target, change, quantization_config=quantization)


def varied(weight: Tensor, block: tuple[int, int], seed: int = 0) -> Tensor:
    """The weight [out, in] with each block times a power of two, and as large as before."""
    generator = torch.Generator().manual_seed(seed)
    grid = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    factors = torch.exp2(torch.randint(-6, 3, grid, generator=generator).float())
    factors = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    changed = weight * factors[: weight.shape[0], : weight.shape[1]]
    return changed * (weight.norm() / changed.norm())


def draw_tokens(count: int, *, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    """[count] token ids, the same for the same arguments."""
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed))


def edges(lengths: tuple[int, ...] | list[int]) -> Tensor:
    """cu_seqlens [n + 1] of documents of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def probe_loss(logits: Tensor, *, seed: int = 0) -> Tensor:
    """A loss in which every logit of every row counts, the last row of a document too."""
    generator = torch.Generator().manual_seed(seed)
    return (logits.float() * torch.randn(logits.shape, generator=generator)).sum()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients that exist, by parameter name."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_close(got: Tensor, expected: Tensor, limit: float = 1e-6, what: str = "") -> None:
    """max |got - expected| <= limit * max |expected|, and no NaN."""
    assert got.shape == expected.shape, f"{what}: {got.shape} and {expected.shape}"
    if got.numel() == 0:
        return
    error = float((got - expected).abs().max())
    scale = float(expected.abs().max())
    assert error <= limit * scale, f"{what}: error {error:.3g} at scale {scale:.3g}"


def assert_all_close(
    got: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-6, floor: float = 0.0
) -> None:
    """The same names, and every tensor close; the scale is at least `floor` of the largest one."""
    assert got.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        scale = max(float(tensor.abs().max()), floor * largest)
        error = float((got[name] - tensor).abs().max())
        assert error <= limit * scale, f"{name}: error {error:.3g} at scale {scale:.3g}"


def modules_of(model: torch.nn.Module, kind: type) -> Iterator[tuple[str, Any]]:
    """(path, module) of every module of that class."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, kind))
