"""A comparison passes on numbers alone."""

import math

import pytest
import torch

from glm5.errors import CheckFailedError
from glm5.export.check import ExportCheck, check_logits, share_lost


@pytest.mark.parametrize(
    ("error", "ok"),
    [(0.0, True), (1.0, True), (1.0001, False), (math.nan, False), (math.inf, False)],
)
def test_ok(error: float, ok: bool) -> None:
    check = ExportCheck("x", error, 1.0)
    assert check.ok is ok
    assert check.as_dict()["ok"] is ok


def test_logits_are_compared_at_their_scale() -> None:
    reference = torch.tensor([[100.0, 1.0]])
    assert check_logits("x", reference + 0.005, reference).error == pytest.approx(5e-5, rel=1e-2)
    for wrong in (reference + 0.05, reference * math.nan, reference + math.inf):
        with pytest.raises(CheckFailedError, match="other logits: x"):
            check_logits("x", wrong, reference)


def test_the_share_lost_is_relative_to_the_effect() -> None:
    base, wanted = torch.zeros(4), torch.full((4,), 2.0)
    assert share_lost(wanted, wanted, base) == 0.0
    assert share_lost(torch.full((4,), 1.5), wanted, base) == 0.25
    assert share_lost(base, wanted, base) == 1.0
    assert share_lost(base, base, base) == 0.0


def test_what_is_told_is_not_judged() -> None:
    check = ExportCheck("x", 0.4, None)
    assert check.ok and check.as_dict()["limit"] is None
