"""A model without its adapters, for a while: the reference of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from glm5.lora.attach import adapted_modules


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Puts every adapted linear's base in its place, so that the model is the one without adapters.

    Afterwards the adapters are back, the same modules with the same parameters. Whole parameters
    that train beside them stay as they are.
    """
    adapted = [(chunk, *found) for chunk in chunks for found in adapted_modules(chunk)]
    try:
        for chunk, path, module in adapted:
            _put(chunk, path, module.base)
        yield
    finally:
        for chunk, path, module in adapted:
            _put(chunk, path, module)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
