"""`glm5 verify`."""

from __future__ import annotations

from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.load import load_model
from glm5.cli.output import Output
from glm5.parity.hf_side import load_reference
from glm5.parity.verify import Report, verify


def run_verify(hf_dir: str, *, json: bool) -> int:
    """Prints the comparison; returns the exit code."""
    output = Output(json)
    report = verify_checkpoint(hf_dir)
    show_report(output, report)
    if json:
        output.result(report.as_dict())
    return 0 if report.ok else 1


def verify_checkpoint(hf_dir: str) -> Report:
    """Loads both sides in fp32 on this machine's device and compares them."""
    folder = hf_folder(hf_dir)
    model = load_model(folder, dtype="float32")
    device = next(model.parameters()).device
    reference = load_reference(folder, model.config.glm5, device)
    return verify(model, reference)


def show_report(output: Output, report: Report) -> None:
    """The table of findings and the verdict."""
    rows = [(f.case, f.quantity, f.worst, f.error, f.limit, f.ok) for f in report.findings]
    output.table(
        "glm5 against transformers, fp32",
        ("case", "quantity", "worst", "error", "limit", ""),
        rows,
    )
    for note in report.notes:
        output.say(f"note: {note}")
    ties = f" ({report.tied_rows} rows with tied scores)" if report.tied_rows else ""
    output.say(f"verdict: {'the same model' if report.ok else 'NOT the same model'}{ties}")
