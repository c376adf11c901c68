"""What the benchmark prints, and what it refuses to print, without a GPU."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.bench import plain
from glm5.bench.cases import case_names
from glm5.bench.ceilings import Ceilings, Work
from glm5.bench.experts import EXPERTS, group_ends
from glm5.bench.kernels import Row, cells, failed, measure
from glm5.bench.plot import families_of, intensity, plot_roofline
from glm5.bench.problems import (
    OURS,
    PLAIN,
    GradientProblem,
    SelectionProblem,
    relative_errors,
    within_twice,
)
from glm5.cli.bench import run_bench_kernels, show
from glm5.cli.output import Output
from glm5.errors import BackendError, CheckFailedError, ConfigError
from glm5.ops import torch_backend
from glm5.ops.causal_attention import causal_attention
from glm5.ops.grouped import GroupedPair
from glm5.ops.grouped.reference import grouped_linear_reference
from tests.ops import oracles

CEILINGS = Ceilings(matmul=1e15, copy=4e12, gather=8e12, reduce=2e12)
WORKS = {"forward": Work(10**12, 10**6), "backward": Work(10**12, 10**6, 10**6, 10**10)}
PEER = "peer"


def clock(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Runs each once; the n-th takes n milliseconds."""
    for function in functions.values():
        function()
    return {name: float(i) for i, name in enumerate(functions, start=1)}


def measure_here(problem: Any, all_names: bool = True) -> list[Row]:
    return measure(problem, CEILINGS, clock=clock, meter=lambda f: 2**30, all_names=all_names)


def attention(only: dict[str, str] | None = None, **functions: Any) -> GradientProblem:
    indices = oracles.random_selection(7, 9, 4)
    # A row without keys is NaN in plain PyTorch; the cases have none.
    indices[(indices < 0).all(1), 0] = 3

    def right(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        return torch_backend.sparse_mla(q, kv, indices, 0.5, 5)

    known = {OURS: right, PLAIN: lambda q, kv: plain.sparse_mla(q, kv, indices, 0.5, 5)}
    changed = {name: change(right) for name, change in functions.items()}
    return GradientProblem(
        case="attention",
        works=WORKS,
        inputs=(torch.randn(7, 2, 6).bfloat16(), torch.randn(9, 6).bfloat16()),
        grad=torch.randn(7, 2, 5).bfloat16(),
        functions=known | changed,
        exact=right,
        only=only or {},
    )


def wrong(place: int) -> Callable[..., Any]:
    """Makes a function whose output, or one of whose gradients, is 1.1 times too large."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*leaves: Tensor) -> Any:
            if place == 0:
                out, *rest = function(*leaves)
                return (out + 0.1 * out.detach(), *rest)
            scaled = list(leaves)
            leaf = leaves[place - 1]
            scaled[place - 1] = 1.1 * leaf - 0.1 * leaf.detach()
            return function(*scaled)

        return changed

    return change


def test_times_rates_and_shares() -> None:
    rows = measure_here(attention())
    assert [(row.operation, row.implementation) for row in rows] == [
        (operation, name) for operation in WORKS for name in (OURS, PLAIN)
    ]
    forward, plain_forward, backward, _ = rows
    assert all(row.ok and row.peak_bytes == 2**30 for row in rows)
    assert (forward.ms, forward.tflops, forward.limit) == (1.0, 1000.0, "matmul")
    assert forward.of_limit == pytest.approx(1.0)
    # 10 GB at 2 TB/s take 5 ms, the products 1 ms.
    assert (backward.limit, backward.of_limit) == ("reduce", pytest.approx(5.0))
    assert cells(plain_forward, rows)[3:] == ("2.000", "500", "50% of matmul", "1.00", "2.00")


def test_plain_pytorch_is_timed_only_when_asked_for() -> None:
    rows = measure_here(attention(), all_names=False)
    assert {row.implementation for row in rows} == {OURS}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", [OURS, PEER])
def test_no_time_for_a_wrong_output(name: str, place: int) -> None:
    rows = measure_here(attention(**{PEER: lambda right: right, name: wrong(place)}))
    for row in rows:
        assert row.ok == (row.implementation != name)
        assert (row.ms is None) == (row.implementation == name)
        assert ("WRONG" in cells(row, rows)[3]) == (row.implementation == name)
    assert bool(failed(rows)) == (name == OURS)


@pytest.mark.parametrize("make", [lambda right: right, wrong(2)])
def test_a_peer_of_one_pass_is_named_in_that_pass_alone(make: Callable[..., Any]) -> None:
    rows = measure_here(attention({PEER: "backward"}, **{PEER: make}))
    assert [row.operation for row in rows if row.implementation == PEER] == ["backward"]
    assert {row.operation for row in rows if row.implementation == OURS} == set(WORKS)


def test_an_output_that_nobody_wrote_is_wrong() -> None:
    errors = relative_errors((torch.tensor([1.0, torch.nan, 1.0]),), (torch.ones(3),))
    assert not within_twice(errors, (1.0,))
    assert within_twice((2e-3,), (1e-3,)) and not within_twice((2.1e-3,), (1e-3,))


RIGHT = [[0, 7, 8, 9], [0, 2, 3, 5], [0, 1, -1, -1]]


def selection(select: Callable[[Tensor], Tensor]) -> SelectionProblem:
    scores, ends = torch.tensor([5, 1, 4, 4, 2, 3, 0, 7, 7, 6]).double(), (10, 6, 2)
    return SelectionProblem(
        case="indexer",
        works={"select": WORKS["forward"]},
        functions={OURS: lambda: select(torch.tensor(RIGHT))},
        exact_scores=lambda row: scores[: ends[row]],
        plain_scores=lambda row: scores[: ends[row]].float(),
        rows=[0, 1, 2],
        topk=4,
    )


def test_a_right_selection_is_timed() -> None:
    (row,) = measure_here(selection(lambda selected: selected))
    assert row.ok and row.ms == 1.0


@pytest.mark.parametrize(
    "changed",
    [
        {(0, 3): 2},  # a worse key
        {(0, 3): 0},  # a key twice
        {(1, 3): -1},  # a key too few
        {(2, 1): 9},  # a key of the future
        {(2, 2): 3},  # a key too many
    ],
)
def test_a_wrong_selection_is_not(changed: dict[tuple[int, int], int]) -> None:
    def select(selected: Tensor) -> Tensor:
        for place, key in changed.items():
            selected[place] = key
        return selected

    (row,) = measure_here(selection(select))
    assert not row.ok and row.ms is None


def test_a_selection_that_changes_from_run_to_run_is_wrong() -> None:
    tied = iter([RIGHT[1], [0, 3, 2, 5]])
    (row,) = measure_here(selection(lambda x: torch.tensor([RIGHT[0], next(tied), RIGHT[2]])))
    assert not row.ok


def test_plain_loss_and_selection_are_the_references() -> None:
    index = torch.randn(6, 3, 4), torch.randn(6, 4), torch.randn(6, 3)
    q, kv, (starts, ends) = torch.randn(6, 2, 5), torch.randn(6, 5), oracles.causal_bounds(6)
    indices = torch_backend.select_topk(*index, starts, ends, 3)
    selected = plain.select_topk(*index, starts, ends, 3)
    assert torch.equal(selected.sort().values, indices.sort().values)
    expected = torch_backend.sparse_mla_with_mass(q, kv, indices, 0.5, 4)
    found = plain.sparse_mla_with_mass(q, kv, indices, 0.5, 4)
    torch.testing.assert_close(found, expected)
    mass = expected[2]
    expected_kl = torch_backend.indexer_kl(*index, indices, mass)
    torch.testing.assert_close(plain.indexer_kl(*index, indices, mass), expected_kl)


def test_a_wrong_kernel_ends_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure_here(attention(**{OURS: wrong(0)}))
    with pytest.raises(CheckFailedError, match="attention, forward") as caught:
        show(Output(True), rows, CEILINGS, {"device": "none"}, "")
    assert caught.value.exit_code == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ceilings"]["matmul"] == 1e15
    assert {"ms" in row for row in result["rows"] if row["implementation"] == OURS} == {False}


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"(?s)GPU.*no CUDA device") as caught:
        run_bench_kernels(with_peers=False, roofline=None, json=False)
    assert caught.value.exit_code == 2


def test_a_name_that_no_case_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"(?s)expert5.*experts fc1, 256, base alone"):
        run_bench_kernels(with_peers=False, only="expert5", roofline=None, json=False)
    assert len(case_names("experts")) == len(EXPERTS) and set(case_names()) > set(case_names("fc1"))


@pytest.mark.parametrize("shared", [(), ("a",), ("b",)])
def test_plain_experts_are_the_reference(shared: tuple[str, ...]) -> None:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    x, weight = torch.randn(8, 16).bfloat16(), torch.randn(3, 16, 16).bfloat16()
    sizes = {name: 1 if name in shared else 3 for name in "ab"}
    a, b = torch.randn(sizes["a"], 8, 16).bfloat16(), torch.randn(sizes["b"], 16, 8).bfloat16()
    for pairs in ([], [GroupedPair(a, b, 0.5)]):
        ours, exact = (
            function(x, weight, ends, pairs)
            for function in (plain.grouped_linear, grouped_linear_reference)
        )
        torch.testing.assert_close(ours, exact, atol=0.5, rtol=0.05)


def test_uneven_experts() -> None:
    ends = group_ends(32, 65536, "skewed")
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends[-1] == 65536 and 0.6 <= sizes.max() / 65536 < 0.61
    ends = group_ends(256, 65536, "random")
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends[-1] == 65536 and 150 < sizes.min() < 256 < sizes.max() < 350
    assert torch.equal(group_ends(4, 8, "even"), torch.tensor([2, 4, 6, 8], dtype=torch.int32))


def test_roofline(tmp_path: Path) -> None:
    assert intensity(WORKS["backward"], CEILINGS) == ("reduce", 100.0)
    assert intensity(WORKS["forward"], CEILINGS) == ("copy", 1e6)
    rows = measure_here(attention(), all_names=False)
    works = {("attention", name): work for name, work in WORKS.items()}
    plot_roofline(rows, works, CEILINGS, tmp_path / "deep" / "roofline.png")
    assert (tmp_path / "deep" / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert list(families_of(rows)) == ["attention"]
    others = [dataclasses.replace(rows[0], case=case) for case in ("1 x 9 to 9", "experts fc1")]
    assert list(families_of([*others, rows[0]])) == ["short documents", "experts", "attention"]


def test_plain_dense_attention_is_the_measured_one() -> None:
    lengths = [3, 1, 5]
    q, k, v = (torch.randn(9, 2, d) for d in (4, 4, 3))
    torch.testing.assert_close(
        plain.causal_attention(q, k, v, lengths, 0.5), causal_attention(q, k, v, lengths, 0.5)
    )


def test_a_peer_that_cannot_run_costs_the_others_nothing() -> None:
    def broken(_: Callable[..., Any]) -> Callable[..., Any]:
        def raises(*tensors: Tensor) -> Any:
            raise RuntimeError("no compiler")

        return raises

    rows = measure_here(attention(**{PEER: broken}))
    row = next(row for row in rows if row.implementation == PEER)
    assert row.ms is None and row.failure == "RuntimeError: no compiler"
    assert "FAILED, RuntimeError: no compiler" in cells(row, rows)
    assert all(row.ms for row in rows if row.implementation == OURS)
    assert not failed(rows)
    with pytest.raises(RuntimeError, match="no compiler"):
        measure_here(attention(**{OURS: broken}))
