"""A rank without peers: every output is written, every byte counted, what needs a peer refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.processes import run_ranks
from tests.runtime.stand_in_jobs import outputs, refusals

FLOAT = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    (result,) = run_ranks(tmp_path_factory.mktemp("outputs"), 1, outputs)
    return result


def test_every_output_is_written_with_what_the_rank_has(found: dict[str, Tensor]) -> None:
    rows = torch.arange(6.0).view(2, 3)
    assert torch.equal(found["all_gather"], rows.repeat(4, 1))
    assert found["all_gather_in_place"].tolist() == [1, 2] * 4
    assert found["all_gather_list"].tolist() == [[1, 2]] * 4
    assert found["reduce_scatter"].tolist() == [4, 5]
    assert found["all_reduce"].tolist() == [3] and found["broadcast"].tolist() == [5]


def test_rows_are_sent_round_until_the_output_is_full(found: dict[str, Tensor]) -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(found["all_to_all"], torch.cat([rows, rows, rows[:1]]))
    assert found["all_to_all_of_nothing"].tolist() == [[0, 0]]


def test_what_would_have_travelled_is_noted(found: dict[str, Tensor]) -> None:
    """The other three ranks' parts; a row that stays here does not travel, a sum travels twice."""
    assert found["noted"] == [
        ["all-gather", "cp", 3 * 6 * FLOAT],
        ["all-gather", "cp", 3 * 2 * FLOAT],
        ["all-gather", "cp", 3 * 2 * FLOAT],
        ["reduce-scatter", "cp", 3 * 2 * FLOAT],
        ["all-reduce", "cp", 2 * 3 * FLOAT // 4],
        # of seven rows received two stay, of three sent one does
        ["all-to-all", "cp", (7 - 2) * 2 * FLOAT],
        ["all-to-all", "cp", 2 * FLOAT],
        ["broadcast", "cp", FLOAT],
    ]


def test_what_needs_a_peer_is_refused(tmp_path: Path) -> None:
    (errors,) = run_ranks(tmp_path, 1, refusals)
    assert "cannot send to another one" in errors[0]
    assert "cannot receive from another one" in errors[1]
    assert "a broadcast by rank 0 of 4" in errors[2]
