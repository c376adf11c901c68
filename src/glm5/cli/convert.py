"""`glm5 convert`."""

from __future__ import annotations

from pathlib import Path

from glm5.checkpoint.to_megatron import convert
from glm5.cli.output import Output
from glm5.cli.progress import byte_bar


def run_convert(hf_dir: str, ckpt_dir: Path, *, json: bool) -> None:
    """Converts with a progress bar on standard error."""
    output = Output(json)
    with byte_bar("reading", quiet=json) as progress:
        record = convert(hf_dir, ckpt_dir, progress=progress)
    output.result(
        {"checkpoint": str(ckpt_dir), "dtype": record.dtype, "include_mtp": record.include_mtp}
    )
