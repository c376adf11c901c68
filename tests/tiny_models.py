"""Tiny checkpoints on disk, and short ways to run the models made from them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TinyFolder = Callable[..., Path]
VARIANTS = ("5", "5.1", "5.2")


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
