"""`glm5 convert-core`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from glm5.checkpoint.core_layout import NormPlace
from glm5.cli.output import Output
from glm5.errors import ConfigError
from glm5.export.core import core_from_hf, core_to_hf
from glm5.runtime.megatron_core import RopeSlice

Side = Literal["hf", "core"]


def run_convert_core(
    source: str,
    target: Path,
    to: Side,
    *,
    model: str | None,
    indexer_rope: RopeSlice | None,
    latent_norms: NormPlace | None,
    json: bool,
) -> None:
    """Converts, and tells the layout of the core's side."""
    output = Output(json)
    if (to == "hf") != (model is not None):
        raise ConfigError(
            "--model is the Hugging Face folder with config.json and tokenizer, for --to hf",
            got=f"--to {to}, --model {model}",
            remedy="give it with --to hf, and leave it out with --to core",
        )
    if to == "hf" and latent_norms is not None:
        raise ConfigError(
            "the names of the tensors tell where the norms of the latents are",
            got=f"--to hf --latent-norms {latent_norms}",
            remedy="leave --latent-norms out",
        )
    if model is not None:
        layout = core_to_hf(Path(source), model, target, indexer_rope=indexer_rope)
    else:
        layout = core_from_hf(source, target, indexer_rope=indexer_rope, latent_norms=latent_norms)
    output.result({"folder": str(target), "for": to} | asdict(layout))
