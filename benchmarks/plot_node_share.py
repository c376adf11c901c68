"""Draws what fills a GPU from results of `glm5 bench node-share --json`, one bar for each.

`python -m benchmarks.plot_node_share OUT.png RESULT.json [RESULT.json ...]`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from glm5.plan.hardware import GIB


def parts_of(result: dict[str, Any]) -> dict[str, float]:
    """GiB of each part, in the order in which they are stacked; together the peak."""
    counts = dict(result["weight_bytes"])
    counts["gradients"] = result["gradient_bytes"]
    counts["optimizer"] = result["optimizer_bytes"]
    counts["activations and the fullest moment"] = result["passing_bytes"]
    # buffers of the allocator between steps, and what else is in no part
    counts["rest"] = max(0, result["peak_bytes"] - sum(counts.values()))
    return {name: count / GIB for name, count in counts.items() if count > 0}


def label_of(result: dict[str, Any]) -> str:
    """Layout, rank and layers of a result."""
    options = result["options"]
    return f"{options['layout']}, rank {options['rank']}\n{result['layers']} layers"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: stacked bars of measured parts, marks at the predicted peaks and the limit."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 2.2 + 1.1 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = [parts_of(result) for result in results]
    names = list(dict.fromkeys(name for parts in bars for name in parts))
    starts = [0.0] * len(bars)
    for number, name in enumerate(names):
        widths = [parts.get(name, 0.0) for parts in bars]
        color = colormaps["tab20"](number)
        axes.barh(range(len(bars)), widths, left=starts, color=color, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, result in enumerate(results):
        predicted = result["predicted_peak_bytes"] / GIB
        label = "predicted peak" if row == 0 else None
        axes.plot([predicted] * 2, [row - 0.45, row + 0.45], "k--", label=label)
    limit = max(result["options"]["limit_gib"] for result in results)
    axes.axvline(limit, color="red", label=f"limit, {limit:g} GiB")
    axes.set_yticks(range(len(results)), [label_of(result) for result in results])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="PNG")
    parser.add_argument("results", type=Path, nargs="+", help="JSON objects of the command")
    options = parser.parse_args()
    draw([json.loads(path.read_text("utf-8")) for path in options.results], options.out)


if __name__ == "__main__":
    main()
