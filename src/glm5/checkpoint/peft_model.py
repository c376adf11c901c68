"""PEFT's layers on a `transformers` model: put there from a folder, and taken off again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from glm5.checkpoint.adapter_file import WEIGHTS_FILE
from glm5.checkpoint.hf_model import load_hf_model
from glm5.config import Glm5Config
from glm5.errors import AdapterError

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_NAME = "default"


def load_peft_model(
    folder: str | Path,
    hf_dir: str | Path,
    glm5: Glm5Config,
    *,
    device: str | torch.device = "cpu",
) -> PeftModel:
    """The transformers model of `hf_dir` in fp32 with the adapter of `folder`, in eval mode.

    Raises AdapterError when peft is not installed or refuses the folder, ConfigError and
    CheckpointError when transformers cannot express or load the base.
    """
    check_peft_folder(folder)
    return attach_adapter(load_hf_model(hf_dir, glm5), folder).to(device)


def check_peft_folder(folder: str | Path) -> None:
    """Raises AdapterError when peft is not installed, or would have to unpickle the weights."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise AdapterError(
            "an adapter on a transformers model needs peft",
            got=error,
            remedy="pip install 'peft>=0.21.2'",
        ) from error
    if not (Path(folder) / WEIGHTS_FILE).is_file():
        # Without this file PEFT would unpickle adapter_model.bin.
        raise AdapterError(
            f"{folder} has no {WEIGHTS_FILE}",
            expected="safetensors; pickled weights are never loaded",
            remedy="export the adapter again",
        )


def attach_adapter(base: Any, folder: str | Path) -> PeftModel:
    """The base with the adapter of `folder`, in eval mode; PEFT puts its layers into the base.

    Raises AdapterError when PEFT refuses the folder; layers of PEFT may then be in the base.
    """
    check_peft_folder(folder)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # A false alarm: PEFT looks for them among modules, but applies them to parameters.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not")
            model = PeftModel.from_pretrained(base, str(folder), adapter_name=ADAPTER_NAME)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AdapterError(
            f"PEFT cannot load {folder}", got=error, remedy="export the adapter again"
        ) from error
    return model.eval()


def detach_adapter(model: PeftModel) -> Any:
    """The base model, as it was before `attach_adapter`."""
    base = model.get_base_model()
    # PEFT leaves its trained copies of whole modules behind
    originals = dict(_replaced_modules(base))
    base = model.unload()
    for name, module in originals.items():
        base.set_submodule(name, module)
    return base


def _replaced_modules(base: nn.Module) -> list[tuple[str, nn.Module]]:
    from peft.utils.other import ModulesToSaveWrapper

    return [
        (name, module.original_module)
        for name, module in base.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    ]
