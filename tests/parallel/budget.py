"""How far a layout may be from one process, where rounding makes them differ."""

import torch
from torch import Tensor

BF16_EPS = 2.0**-8


def largest_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest |got - expected| / |expected| of all tensors, in the Euclidean norm."""
    assert got.keys() == expected.keys()
    return max(_distance(got[n], expected[n]) / max(_norm(expected[n]), 1e-30) for n in expected)


def budget_used(got: dict[str, Tensor], one: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest |got - exact| / (2 |one - exact| + eps |exact|); above 1 is out of budget.

    `one` is one process in bf16, `exact` the same in fp32: a layout may round as much again.
    """
    assert got.keys() == one.keys() == exact.keys()
    return max(
        _distance(got[n], exact[n])
        / max(2 * _distance(one[n], exact[n]) + BF16_EPS * _norm(exact[n]), 1e-30)
        for n in exact
    )


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()))


def _norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double()))
