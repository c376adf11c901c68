"""The picture of what fills a GPU: its parts add up to the peak, and it is written."""

from pathlib import Path
from typing import Any

from benchmarks.plot_node_share import draw, parts_of

GIB = 2**30


def result(peak: int) -> dict[str, Any]:
    return {
        "options": {"layout": "ep=8,cp=8", "rank": 7, "limit_gib": 132.0},
        "layers": 78,
        "weight_bytes": {"routed experts": 84 * GIB, "attention": 12 * GIB},
        "gradient_bytes": 1 * GIB,
        "optimizer_bytes": 3 * GIB,
        "passing_bytes": 15 * GIB,
        "peak_bytes": peak,
        "predicted_peak_bytes": 118 * GIB,
    }


def test_parts_add_up_to_the_peak() -> None:
    parts = parts_of(result(116 * GIB))
    assert sum(parts.values()) == 116 and parts["rest"] == 1
    assert "rest" not in parts_of(result(115 * GIB))


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "breakdown.png"
    draw([result(116 * GIB), result(115 * GIB)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
