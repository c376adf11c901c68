"""`glm5 convert`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.to_megatron import convert
from glm5.cli.output import Output


def run_convert(hf_dir: str, ckpt_dir: Path, *, json: bool) -> None:
    """Converts with a progress bar on standard error."""
    output = Output(json)
    total = sum(file.stat().st_size for file in hf_folder(hf_dir).glob("*.safetensors"))
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=json) as bar:
        task = bar.add_task("reading", total=total)
        record = convert(hf_dir, ckpt_dir, progress=lambda count: bar.advance(task, count))
    output.result(
        {"checkpoint": str(ckpt_dir), "dtype": record.dtype, "include_mtp": record.include_mtp}
    )
