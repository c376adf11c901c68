"""Loads a checkpoint as `transformers` does, without its chatter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def load_hf_model(folder: str | Path, *, config: Any = None) -> Any:
    """The `transformers` causal model of a local folder, fp32, eager attention, evaluation mode.

    Weights come from safetensors only. `config` replaces the one that transformers would read.
    """
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
        )
    return model.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and no report that the MTP layer, which it never builds, is unexpected."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
