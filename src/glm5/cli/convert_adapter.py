"""`glm5 convert-adapter`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm5.checkpoint.adapter import ExpertLora
from glm5.checkpoint.adapter_convert import Conversion, convert_adapter
from glm5.checkpoint.adapter_engines import Consumer
from glm5.cli.output import Output
from glm5.cli.progress import progress_bar
from glm5.cli.serving import server_flags
from glm5.plan.models import read_model


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of the command."""

    to: Consumer
    model: str
    read_as: Consumer | None
    expert_lora: ExpertLora | None
    without: tuple[str, ...]


def run_convert_adapter(source: Path, target: Path, options: ConvertOptions, *, json: bool) -> None:
    """Converts with a progress bar on standard error, and tells how to serve the result."""
    output = Output(json)
    name, config = read_model(options.model)
    with progress_bar("tensors", quiet=json) as progress:
        done = convert_adapter(
            source,
            target,
            options.to,
            config,
            base_name=name,
            read_as=options.read_as,
            expert_lora=options.expert_lora,
            without=options.without,
            progress=progress,
        )
    output.result({"folder": str(target), "for": options.to} | _found(done, options.to))


def _found(done: Conversion, to: Consumer) -> dict[str, object]:
    serving = done.serving
    found: dict[str, object] = {
        "read as": done.read_as,
        "expert_lora": done.expert_lora,
        "linears": done.num_linears,
        "largest rank": done.max_rank,
        "largest error": done.error,
    }
    if serving is not None and to != "peft":
        found |= {
            "linears filled with zeros": serving.num_filled,
            "linears rescaled and rounded": serving.num_rounded,
            "serve with": server_flags(to, serving.rank, done.expert_lora),
        }
    return found
