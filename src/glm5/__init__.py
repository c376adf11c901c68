"""LoRA and full fine-tuning of the GLM-5 family on Megatron-Core."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5.checkpoint.load import load_model as load_model
    from glm5.config import Glm5Config as Glm5Config
    from glm5.model.forward import logits as logits

__version__ = "0.1.0"

# Where each public name lives: it is imported on first use, so that `import glm5` stays light.
_HOMES = {
    "Glm5Config": "glm5.config",
    "load_model": "glm5.checkpoint.load",
    "logits": "glm5.model.forward",
}

__all__ = ["Glm5Config", "__version__", "load_model", "logits"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
