"""`glm5 export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm5.checkpoint.adapter_engines import Consumer
from glm5.checkpoint.adapter_layout import MLP_TARGETS
from glm5.checkpoint.adapter_settings import AdapterSettings
from glm5.checkpoint.ckpt_dir import find_checkpoint, read_record
from glm5.cli.output import Output
from glm5.cli.serving import server_flags
from glm5.config import Glm5Config
from glm5.export.check import ExportCheck
from glm5.export.export import Form, export
from glm5.export.merged import MergedWeights


def run_export(
    ckpt_dir: Path,
    out_dir: Path,
    form: Form,
    consumer: Consumer = "peft",
    *,
    without: Sequence[str] = (),
    weights: MergedWeights | None = None,
    json: bool,
) -> None:
    """Exports and shows what was checked before the folder appeared."""
    output = Output(json)
    checks = export(ckpt_dir, out_dir, form, consumer, without=without, weights=weights)
    stored = _stored(out_dir, form)
    serving = _serving(ckpt_dir, out_dir, consumer, without)
    output.table(
        f"{out_dir} ({' for '.join([form, *_for(form, consumer).values()])})",
        ("compared", "error", "limit", ""),
        [(check.what, check.error, *_verdict(check)) for check in checks],
    )
    output.result(
        {
            "folder": str(out_dir),
            "as": form,
            **_for(form, consumer),
            **stored,
            "checks": [check.as_dict() for check in checks],
            **serving,
        }
        if json
        else {"folder": out_dir, **stored, **serving}
    )


def _serving(
    ckpt_dir: Path, out_dir: Path, consumer: Consumer, without: Sequence[str]
) -> dict[str, str]:
    """How to serve the folder."""
    if consumer == "peft":
        return {}
    lora = read_record(find_checkpoint(ckpt_dir)).lora
    assert lora is not None, "an adapter was exported"
    kept = set(lora.targets) - set(without)
    layout = lora.expert_lora if kept.intersection(MLP_TARGETS) else "none"
    return {"serve with": server_flags(consumer, AdapterSettings.read(out_dir).r, layout)}


def _stored(out_dir: Path, form: Form) -> dict[str, str]:
    """How the weights of a merged checkpoint are stored."""
    if form != "merged":
        return {}
    glm5 = Glm5Config.from_hf(out_dir)
    return {"weights": glm5.dtype if glm5.fp8 is None else "fp8"}


def _for(form: Form, consumer: Consumer) -> dict[str, str]:
    return {"for": consumer} if form == "adapter" else {}


def _verdict(check: ExportCheck) -> tuple[object, object]:
    return ("-", "told") if check.limit is None else (check.limit, check.ok)
