"""The grouped linear against the product with one merged weight per row."""

import pytest
import torch

from glm5.ops.grouped import GroupedPair, grouped_linear

ENDS = torch.tensor([3, 3, 4, 9], dtype=torch.int32)
N, IN, OUT, RANK = len(ENDS), 6, 8, 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shared", ["none", "a", "b"])
@pytest.mark.parametrize("second", [True, False])
def test_equals_merged_weights(shared: str, second: bool) -> None:
    torch.manual_seed(0)
    x, weight = draw(9, IN), draw(N, OUT, IN)
    sizes = {"a": 1 if shared == "a" else N, "b": 1 if shared == "b" else N}
    pairs = [
        GroupedPair(draw(sizes["a"], RANK, IN), draw(sizes["b"], OUT // 2, RANK), 0.5)
        for _ in range(1 + second)
    ]
    given = pairs if second else [None, *pairs]
    leaves = [x, weight, *(factor for pair in pairs for factor in (pair.a, pair.b))]

    group = torch.bucketize(torch.arange(9), ENDS, right=True)
    zeros = torch.zeros(N, OUT // 2, IN, dtype=torch.float64)
    delta = torch.cat(
        [zeros if p is None else (p.scale * p.b @ p.a).expand(N, -1, -1) for p in given], dim=1
    )
    expected = torch.einsum("ti,toi->to", x, (weight + delta)[group])
    got = grouped_linear(x, weight, ENDS, given)

    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_pairs_see_their_own_input() -> None:
    torch.manual_seed(0)
    x, seen, weight = draw(9, IN), draw(9, IN), draw(N, OUT, IN)
    pair = GroupedPair(draw(N, RANK, IN), draw(N, OUT, RANK), 2.0)
    got = grouped_linear(x, weight, ENDS, [pair], seen)
    only = grouped_linear(seen, torch.zeros_like(weight), ENDS, [pair])
    torch.testing.assert_close(got, grouped_linear(x, weight, ENDS) + only)
