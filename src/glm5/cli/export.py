"""`glm5 export`."""

from __future__ import annotations

from pathlib import Path

from glm5.checkpoint.adapter_engines import Consumer
from glm5.cli.output import Output
from glm5.export.check import ExportCheck
from glm5.export.export import Form, export


def run_export(
    ckpt_dir: Path, out_dir: Path, form: Form, consumer: Consumer = "peft", *, json: bool
) -> None:
    """Exports and shows what was checked before the folder appeared."""
    output = Output(json)
    checks = export(ckpt_dir, out_dir, form, consumer)
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
            "checks": [check.as_dict() for check in checks],
        }
        if json
        else {"folder": out_dir}
    )


def _for(form: Form, consumer: Consumer) -> dict[str, str]:
    return {"for": consumer} if form == "adapter" else {}


def _verdict(check: ExportCheck) -> tuple[object, object]:
    return ("-", "told") if check.limit is None else (check.limit, check.ok)
