"""`glm5 verify`."""

from __future__ import annotations

from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.load import load_model
from glm5.cli.output import Output
from glm5.config import Glm5Config
from glm5.model.transformer_config import BaseWeights
from glm5.parity.compare import Finding
from glm5.parity.hf_side import load_float8_reference, load_reference
from glm5.parity.verify import Report, verify


def run_verify(hf_dir: str, *, base_weights: BaseWeights | None = None, json: bool) -> int:
    """Prints the comparison; returns the exit code."""
    output = Output(json)
    report = verify_checkpoint(hf_dir, base_weights)
    show_report(output, report)
    if json:
        output.result(report.as_dict())
    return 0 if report.ok else 1


def verify_checkpoint(hf_dir: str, base_weights: BaseWeights | None = None) -> Report:
    """Loads both sides in fp32 on this machine's device and compares them.

    base_weights: as of `load_model`; None: "fp8" for an FP8 checkpoint.
    """
    folder = hf_folder(hf_dir)
    if base_weights is None:
        base_weights = "dtype" if Glm5Config.from_hf(folder).fp8 is None else "fp8"
    model = load_model(folder, dtype="float32", base_weights=base_weights)
    device = next(model.parameters()).device
    load = load_reference if base_weights == "dtype" else load_float8_reference
    return verify(model, load(folder, model.config.glm5, device))


def show_report(output: Output, report: Report) -> None:
    """The table of findings and the verdict."""
    rows = [(f.case, f.quantity, f.worst, f.error, _limit(f), f.ok) for f in report.findings]
    output.table(
        "glm5 against transformers, fp32",
        ("case", "quantity", "worst", "error", "limit", ""),
        rows,
    )
    for note in report.notes:
        output.say(f"note: {note}")
    ties = f" ({report.tied_rows} rows with tied scores)" if report.tied_rows else ""
    output.say(f"verdict: {'the same model' if report.ok else 'NOT the same model'}{ties}")


def _limit(finding: Finding) -> float | str:
    return "told" if finding.limit is None else finding.limit
