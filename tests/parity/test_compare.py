"""Comparisons fail on NaN, on missing layers and on picks that rounding cannot explain."""

import math

import pytest
import torch
from torch import Tensor

from glm5.parity.compare import (
    LIMIT,
    Finding,
    compare,
    compare_selections,
    gradient_errors,
    relative_error,
)
from glm5.parity.observation import Observation, block_mask, document_slices, next_token_loss

NAN = float("nan")


def test_relative_error_is_measured_at_the_scale_of_the_reference() -> None:
    reference = torch.tensor([1.0, -4.0])
    assert relative_error(reference + torch.tensor([0.0, 1.0]), reference) == 0.25
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0
    # an all-zero reference must not divide by zero into a pass
    assert relative_error(torch.ones(2), torch.zeros(2)) > 1e30


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_nan_or_infinity_on_either_side_fails(value: float, side: int) -> None:
    pair = [torch.ones(3), torch.ones(3)]
    pair[side][1] = value
    finding = Finding("case", "logits", "-", relative_error(*pair), LIMIT)
    assert not finding.ok
    assert finding.as_dict()["ok"] is False


def _observation(scores: list[list[float]], selected: list[list[int]]) -> Observation:
    return Observation(
        logits=torch.zeros(len(scores), 5),
        hidden={0: torch.ones(len(scores), 4)},
        scores={0: torch.tensor(scores, dtype=torch.float32)},
        selected={0: torch.tensor(selected, dtype=torch.int32)},
        gradients={"w": torch.ones(2)},
    )


# One document of 4 tokens, topk 2; the last row has a choice of 2 among 4 keys.
SELECTED = [[0, -1], [0, 1], [0, 2], [1, 3]]


def _with_last_row(last_scores: list[float], last_selected: list[int]) -> Observation:
    return _observation(
        [[1, 0, 0, 0], [1, 2, 0, 0], [3, 1, 2, 0], last_scores], [*SELECTED[:3], last_selected]
    )


def test_equal_selections_in_any_order_are_equal() -> None:
    ours = _with_last_row([1, 5, 2, 4], [1, 3])
    theirs = _with_last_row([1, 5, 2, 4], [3, 1])
    (selection,) = compare_selections(ours, theirs, [4])
    assert (selection.different_rows, selection.wrong_rows) == (0, 0)


def test_an_exact_tie_may_be_broken_either_way() -> None:
    ours = _with_last_row([4, 5, 4, 4], [0, 1])
    theirs = _with_last_row([4, 5, 4, 4], [1, 3])
    (selection,) = compare_selections(ours, theirs, [4])
    assert (selection.different_rows, selection.wrong_rows) == (1, 0)


def test_a_gap_within_the_rounding_of_the_scores_may_go_either_way() -> None:
    ours = _with_last_row([1, 5, 4.0001, 4], [1, 2])
    theirs = _with_last_row([1, 5, 4, 4.0001], [1, 3])
    (selection,) = compare_selections(ours, theirs, [4])
    assert (selection.different_rows, selection.wrong_rows) == (1, 0)


@pytest.mark.parametrize(
    "mine",
    [
        pytest.param([1, 2], id="lower score than the k-th"),
        pytest.param([2, 3], id="best key left out"),
        pytest.param([1, -1], id="too few keys"),
    ],
)
def test_a_pick_that_rounding_cannot_explain_is_wrong(mine: list[int]) -> None:
    ours = _with_last_row([1, 5, 2, 4], mine)
    theirs = _with_last_row([1, 5, 2, 4], [1, 3])
    (selection,) = compare_selections(ours, theirs, [4])
    assert (selection.different_rows, selection.wrong_rows) == (1, 1)


def test_too_many_keys_among_ties_are_wrong() -> None:
    ours = _with_last_row([4, 4, 4, 4], [0, 1])
    ours.selected[0] = torch.tensor([[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 2]])
    theirs = _with_last_row([4, 4, 4, 4], [1, 3])
    (selection,) = compare_selections(ours, theirs, [4])
    assert selection.wrong_rows == 1


def test_a_nan_score_explains_nothing() -> None:
    ours = _with_last_row([NAN, 5, 4, 4], [1, 2])
    theirs = _with_last_row([1, 5, 4, 4], [1, 3])
    (selection,) = compare_selections(ours, theirs, [4])
    assert selection.wrong_rows == 1


def test_a_key_of_another_document_or_of_the_future_does_not_count_as_selected() -> None:
    scores = [[1.0, 0, 0], [0, 1, 0], [0, 1, 1]]
    ours = _observation(scores, [[0, -1], [1, 0], [1, 2]])
    theirs = _observation(scores, [[0, 2], [1, -1], [1, 2]])
    (selection,) = compare_selections(ours, theirs, [1, 2])
    assert (selection.different_rows, selection.wrong_rows) == (0, 0)


def test_another_set_of_full_layers_makes_every_row_wrong() -> None:
    ours = _with_last_row([1, 5, 2, 4], [1, 3])
    theirs = _with_last_row([1, 5, 2, 4], [1, 3])
    theirs.selected[1] = theirs.selected[0]
    (selection,) = compare_selections(ours, theirs, [4])
    assert (selection.layer, selection.wrong_rows) == (1, 4)


def _errors(ours: Observation, theirs: Observation) -> dict[str, Finding]:
    return {finding.quantity: finding for finding in compare("case", ours, theirs, [4])}


def test_each_finding_names_the_worst_layer_or_tensor() -> None:
    ours, theirs = (_with_last_row([1, 5, 2, 4], [1, 3]) for _ in range(2))
    assert all(finding.ok for finding in _errors(ours, theirs).values())
    ours.hidden[0] = ours.hidden[0] + 1e-3
    ours.gradients["w"] = torch.tensor([1.0, NAN])
    ours.scores[0][3, 1] = 6.0
    found = _errors(ours, theirs)
    assert [q for q, finding in found.items() if not finding.ok] == [
        "hidden states",
        "indexer scores",
        "gradients",
    ]
    assert found["hidden states"].worst == "layer 0"
    assert found["gradients"].worst == "w"
    assert math.isnan(found["gradients"].error)


def test_a_gradient_that_is_rounding_has_the_scale_of_the_model() -> None:
    reference, ours = _observation([[1.0]], [[0]]), _observation([[1.0]], [[0]])
    reference.gradients["zero"], ours.gradients["zero"] = torch.zeros(2), torch.full((2,), 1e-8)
    reference.gradients["small"] = torch.full((2,), 1e-2)
    ours.gradients["small"] = 1.001 * reference.gradients["small"]
    errors = gradient_errors(ours, reference)
    assert errors["zero"] == pytest.approx(1e-6)
    assert errors["small"] == pytest.approx(1e-3, rel=1e-2)
    ours.gradients["zero"] = torch.full((2,), 1e-5)
    assert gradient_errors(ours, reference)["zero"] > LIMIT


def test_scores_are_compared_only_where_a_query_may_look() -> None:
    ours, theirs = (_with_last_row([1, 5, 2, 4], [1, 3]) for _ in range(2))
    ours.scores[0][0, 3] = 99.0
    assert all(finding.ok for finding in _errors(ours, theirs).values())


@pytest.mark.parametrize("quantity", ["hidden", "scores", "gradients"])
def test_a_layer_or_tensor_that_one_side_lacks_fails(quantity: str) -> None:
    ours, theirs = (_with_last_row([1, 5, 2, 4], [1, 3]) for _ in range(2))
    getattr(ours, quantity).clear()
    assert not all(finding.ok for finding in _errors(ours, theirs).values())


def test_block_mask_is_causal_inside_each_document() -> None:
    mask = block_mask([2, 1], torch.device("cpu"))
    assert mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert document_slices([2, 0, 1]) == [slice(0, 2), slice(2, 2), slice(2, 3)]


def test_the_loss_never_predicts_across_documents() -> None:
    logits: Tensor = torch.randn(5, 7, requires_grad=True)
    loss = next_token_loss(logits, torch.tensor([1, 2, 3, 4, 5]), [3, 1, 1])
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(1) > 0).tolist() == [True, True, False, False, False]
    assert next_token_loss(logits, torch.tensor([1, 2, 3, 4, 5]), [1] * 5) == 0
