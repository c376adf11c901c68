"""A roofline: each operation of ours under the ceiling that it meets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2
from pathlib import Path

from glm5.bench.ceilings import Ceilings, Work
from glm5.bench.kernels import Row

_NAMES = {"copy": "HBM copy", "gather": "L2 gather", "reduce": "fp32 sums into L2"}
_BYTES = {"copy": "moved", "gather": "gathered", "reduce": "reduced"}


def intensity(work: Work, ceilings: Ceilings) -> tuple[str, float]:
    """The tightest memory ceiling of an operation, and FLOP per byte that passes it."""
    rates = ceilings._asdict()
    seconds = {name: getattr(work, _BYTES[name]) / rates[name] for name in _BYTES}
    slowest = max(seconds, key=seconds.__getitem__)
    return slowest, work.flops / max(1, getattr(work, _BYTES[slowest]))


def plot_roofline(
    rows: Iterable[Row], works: Mapping[tuple[str, str], Work], ceilings: Ceilings, path: Path
) -> None:
    """Writes a PNG: TFLOP/s against FLOP per byte, one slope for each memory ceiling.

    works: (case, operation) -> Work. Only rows with a time are drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    spread = [2.0 ** (i / 8) for i in range(16, 113)]
    for colour, name in zip(("C0", "C1", "C2"), _NAMES, strict=True):
        rate = ceilings._asdict()[name]
        roof = [min(ceilings.matmul, x * rate) / 1e12 for x in spread]
        axes.plot(spread, roof, color=colour, label=f"{_NAMES[name]} {rate / 1e12:.2f} TB/s")
    labels: dict[tuple[int, int], str] = {}
    for number, row in enumerate((row for row in rows if row.tflops is not None), start=1):
        limit, per_byte = intensity(works[row.case, row.operation], ceilings)
        point = per_byte, row.tflops or 0.0
        axes.plot(*point, "o", color=f"C{list(_NAMES).index(limit)}")
        axes.plot([], [], " ", label=f"{number}: {row.case}, {row.operation}")
        # Points on top of each other share a label.
        near = round(8 * log2(point[0])), round(4 * log2(point[1]))
        labels[near] = f"{labels[near]}, {number}" if near in labels else str(number)
    for near, label in labels.items():
        place = 2 ** (near[0] / 8), 2 ** (near[1] / 4)
        axes.annotate(label, place, (8, 0), textcoords="offset points", va="center")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte through the tightest memory ceiling",
        ylabel="TFLOP/s on valid pairs",
        title=f"bf16 matrix products {ceilings.matmul / 1e12:.0f} TFLOP/s",
    )
    axes.grid(which="both", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
