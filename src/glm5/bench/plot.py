"""A roofline: each operation of ours under the ceiling that it meets, a panel for each family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any

from glm5.bench.ceilings import Ceilings, Work
from glm5.bench.kernels import Row

_NAMES = {"copy": "HBM copy", "gather": "L2 gather", "reduce": "fp32 sums into L2"}
_BYTES = {"copy": "moved", "gather": "gathered", "reduce": "reduced"}
_FAMILIES = ("attention", "indexer", "experts")
_OTHERS = "short documents"
_PANEL_INCHES = (11.0, 3.6)


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

    families = families_of([row for row in rows if row.tflops is not None])
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width, height * max(1, len(families))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(families)), 1, squeeze=False)[:, 0]
    for axes, (family, members) in zip(panels, families.items(), strict=False):
        _draw_ceilings(axes, ceilings)
        _draw_points(axes, members, works, ceilings)
        title = f"{family}; bf16 matrix products {ceilings.matmul / 1e12:.0f} TFLOP/s"
        axes.set(xscale="log", yscale="log", ylabel="TFLOP/s on valid pairs", title=title)
        axes.grid(which="both", alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=7, ncols=2)
    panels[-1].set_xlabel("FLOP per byte through the tightest memory ceiling")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def families_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by what they compute, in the order in which families come."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        first = row.case.split()[0]
        families.setdefault(first if first in _FAMILIES else _OTHERS, []).append(row)
    return families


def _draw_ceilings(axes: Any, ceilings: Ceilings) -> None:
    spread = [2.0 ** (i / 8) for i in range(16, 113)]
    for colour, name in zip(("C0", "C1", "C2"), _NAMES, strict=True):
        rate = ceilings._asdict()[name]
        roof = [min(ceilings.matmul, x * rate) / 1e12 for x in spread]
        axes.plot(spread, roof, color=colour, label=f"{_NAMES[name]} {rate / 1e12:.2f} TB/s")


def _draw_points(
    axes: Any, rows: Sequence[Row], works: Mapping[tuple[str, str], Work], ceilings: Ceilings
) -> None:
    labels: dict[tuple[int, int], list[str]] = {}
    for number, row in enumerate(rows, start=1):
        limit, per_byte = intensity(works[row.case, row.operation], ceilings)
        point = per_byte, row.tflops or 0.0
        axes.plot(*point, "o", color=f"C{list(_NAMES).index(limit)}")
        axes.plot([], [], " ", label=f"{number}: {row.case}, {row.operation}")
        # points on top of each other share a label
        near = round(6 * log2(point[0])), round(3 * log2(point[1]))
        labels.setdefault(near, []).append(str(number))
    for near, numbers in labels.items():
        place = 2 ** (near[0] / 6), 2 ** (near[1] / 3)
        lines = [", ".join(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
        axes.annotate(
            "\n".join(lines), place, (8, 0), textcoords="offset points", va="center", fontsize=8
        )
