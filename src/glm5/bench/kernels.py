"""Checks and times every implementation of every problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from glm5.bench.ceilings import Ceilings
from glm5.bench.problems import OURS, PLAIN, Problem, Verdict

Clock = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]
Meter = Callable[[Callable[[], object]], int]


@dataclass(frozen=True)
class Row:
    """One implementation of one operation; without a time where its output failed the check."""

    case: str
    operation: str
    implementation: str
    errors: tuple[float, ...]
    ok: bool
    ms: float | None = None
    tflops: float | None = None
    limit: str | None = None
    """The ceiling that the operation meets first on this card."""
    of_limit: float | None = None
    """Time at that ceiling divided by the time taken."""
    peak_bytes: int | None = None
    """Memory beyond the inputs, the result included."""
    failure: str | None = None
    """Why there was no output to check."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not measured is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def measure(
    problem: Problem, ceilings: Ceilings, *, clock: Clock, meter: Meter, all_names: bool
) -> list[Row]:
    """Rows of one problem, in the order of its operations and implementations.

    Plain PyTorch is timed with `all_names` only; its errors are the measure of the others'.
    """
    names = [name for name in problem.names() if all_names or name != PLAIN]
    verdicts = {name: _check(problem, name) for name in names}
    timed = {name: problem.timed(name) for name, verdict in verdicts.items() if verdict.ok}
    rows = []
    for operation in problem.works:
        those = [name for name in names if operation in problem.operations(name)]
        functions = {name: timed[name][operation] for name in those if name in timed}
        times = clock(functions) if functions else {}
        for name in those:
            peak = meter(functions[name]) if name in times else None
            rows.append(
                _row(problem, operation, name, verdicts[name], times.get(name), peak, ceilings)
            )
    return rows


def _check(problem: Problem, name: str) -> Verdict:
    """The verdict; a peer that cannot run must not cost the others their times."""
    if name == OURS:
        return problem.check(name)
    try:
        return problem.check(name)
    except Exception as error:  # whatever other people's code raises
        return Verdict((), ok=False, failure=f"{type(error).__name__}: {error}")


def _row(
    problem: Problem,
    operation: str,
    name: str,
    verdict: Verdict,
    ms: float | None,
    peak: int | None,
    ceilings: Ceilings,
) -> Row:
    if ms is None:
        errors, ok, failure = verdict
        return Row(problem.case, operation, name, errors, ok, failure=failure)
    work = problem.works[operation]
    floor_ms, limit = work.floor(ceilings)
    return Row(
        problem.case,
        operation,
        name,
        verdict.errors,
        verdict.ok,
        ms=ms,
        tflops=work.flops / ms / 1e9,
        limit=limit,
        of_limit=floor_ms / ms,
        peak_bytes=peak,
    )


def cells(row: Row, rows: Iterable[Row]) -> tuple[str, ...]:
    """The row for people, in the order of COLUMNS."""
    name = (row.case, row.operation, row.implementation)
    if row.ms is None or row.tflops is None or row.of_limit is None or row.peak_bytes is None:
        errors = " ".join(f"{error:.1e}" for error in row.errors)
        problem = f"FAILED, {row.failure}" if row.failure else f"WRONG, errors {errors}"
        return *name, problem, "", "", "", ""
    ours = [
        other.ms
        for other in rows
        if (other.case, other.operation, other.implementation) == (*name[:2], OURS)
    ]
    return (
        *name,
        f"{row.ms:.3f}",
        f"{row.tflops:.0f}",
        f"{row.of_limit:.0%} of {row.limit}",
        f"{row.peak_bytes / 2**30:.2f}",
        f"{row.ms / ours[0]:.2f}" if ours and ours[0] else "",
    )


COLUMNS = ("case", "operation", "implementation", "ms", "TFLOP/s", "share", "GiB", "x ours")


def failed(rows: Iterable[Row]) -> list[Row]:
    """Our own rows whose output was wrong; a peer's are the peer's."""
    return [row for row in rows if row.implementation == OURS and not row.ok]
