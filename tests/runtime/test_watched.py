"""Watching a backend changes none of its results, and both ranks note what passes their links."""

from pathlib import Path

from tests.parallel.processes import run_ranks
from tests.runtime.watched_jobs import exchange

FLOAT = 4


def test_real_collectives_are_as_they_were_and_noted(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, exchange)
    assert first["gathered"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert second["gathered"].tolist() == first["gathered"].tolist()
    assert (first["scattered"].tolist(), second["scattered"].tolist()) == ([10, 12], [14, 16])
    assert first["rows"].tolist() == [0, 10, 11, 12]
    assert second["rows"].tolist() == [1, 2, 3, 13]
    assert first["total"].tolist() == [10, 12, 14, 16]
    noted = [
        ["all-gather", "world", 4 * FLOAT],
        ["reduce-scatter", "world", 2 * FLOAT],
        ["all-to-all", "world", 3 * FLOAT],
        ["all-reduce", "world", 4 * FLOAT],
    ]
    assert first["noted"] == second["noted"] == noted
    assert first["timed"] and second["timed"]
