"""The fused grouped linear; without a GPU in Triton's interpreter, which tests/conftest.py
switches on."""

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.grouped import GroupedPair
from glm5.ops.grouped.autograd import grouped_linear_fused
from glm5.ops.grouped.reference import grouped_linear_reference
from tests.ops.random_shapes import random_shapes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case:
    """Random tensors of one grouped linear.

    ranks: one for each part of the out_features, 0 for none; shared: which factors all groups
    share; own_input: whether the pairs see another input.
    """

    def __init__(
        self, sizes: list[int], out_features: int, in_features: int, ranks: tuple[int, ...] = (),
        *, shared: str = "", own_input: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        n, t = len(sizes), sum(sizes)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            tensor = torch.randn(*shape, device=DEVICE) * scale
            return tensor.to(dtype).requires_grad_()

        self.ends = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
        self.x, self.weight = draw(t, in_features), draw(n, out_features, in_features, scale=0.05)
        self.pair_input = draw(t, in_features) if own_input else None
        self.grad = draw(t, out_features).detach()
        rows = out_features // max(1, len(ranks))
        self.pairs = [
            GroupedPair(
                draw(1 if "a" in shared else n, rank, in_features, scale=0.05),
                draw(1 if "b" in shared else n, rows, rank), 0.5 + i,
            )
            if rank
            else None
            for i, rank in enumerate(ranks)
        ]  # fmt: skip

    def run(self, function: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The output and all gradients, computed in the dtype."""

        def cast(x: Tensor | None) -> Any:
            return None if x is None else x.detach().to(dtype or x.dtype).requires_grad_()

        x, weight, seen = cast(self.x), cast(self.weight), cast(self.pair_input)
        pairs = [p and GroupedPair(cast(p.a), cast(p.b), p.scale) for p in self.pairs]
        leaves = {"x": x, "weight": weight} | ({} if seen is None else {"pair_input": seen})
        for i, pair in enumerate(pairs):
            if pair is not None:
                leaves |= {f"a{i}": pair.a, f"b{i}": pair.b}
        y = function(x, weight, self.ends, pairs, seen)
        grads = torch.autograd.grad(y, list(leaves.values()), self.grad.to(y.dtype))
        return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "base alone": {"sizes": [3, 0, 40], "out_features": 24, "in_features": 40},
    "one row": {"sizes": [0, 1], "out_features": 8, "in_features": 16, "ranks": (1,)},
    "no rows": {"sizes": [0, 0], "out_features": 8, "in_features": 16, "ranks": (3, 2)},
    "one group": {"sizes": [70], "out_features": 16, "in_features": 8, "ranks": (4,)},
    "all in one group": {"sizes": [0, 70, 0], "out_features": 16, "in_features": 8, "ranks": (4,)},
    "two ranks": {"sizes": [5, 0, 37], "out_features": 34, "in_features": 19, "ranks": (3, 20)},
    "second part alone": {"sizes": [5, 9], "out_features": 20, "in_features": 16, "ranks": (0, 5)},
    "first part alone": {"sizes": [5, 9], "out_features": 20, "in_features": 16, "ranks": (5, 0)},
    "three parts": {"sizes": [9, 2], "out_features": 12, "in_features": 16, "ranks": (2, 0, 3)},
    "shared a": {"sizes": [5, 0, 9], "out_features": 10, "in_features": 7, "ranks": (3, 2)}
    | {"shared": "a"},
    "shared b": {"sizes": [5, 0, 9], "out_features": 10, "in_features": 7, "ranks": (3,)}
    | {"shared": "b"},
    "own input": {"sizes": [5, 33], "out_features": 12, "in_features": 24, "ranks": (3, 2)}
    | {"own_input": True},
    "rank 128": {"sizes": [4, 9], "out_features": 40, "in_features": 24, "ranks": (128, 65)},
    "aligned": {"sizes": [70, 2], "out_features": 128, "in_features": 64, "ranks": (16, 16)},
}


def assert_as_good_as_plain(case: Case, *, repeat: bool = False) -> None:
    """Errors against fp64 at most twice those of plain PyTorch in the same dtype, and rounding."""
    exact = case.run(grouped_linear_reference, torch.float64)
    plain = case.run(grouped_linear_reference)
    ours = case.run(grouped_linear_fused)
    for name, true in exact.items():
        if true.numel() == 0:
            continue
        # Sums in another order may differ by some units of the accumulator's last place.
        eps = torch.finfo(case.x.dtype).eps + 32 * torch.finfo(torch.float32).eps
        rounding = eps * true.abs().max()
        my_error, their_error = ((z[name].double() - true).abs().max() for z in (ours, plain))
        assert my_error <= 2 * their_error + rounding, name
        assert ours[name].dtype == case.x.dtype
    if repeat:
        again = case.run(grouped_linear_fused)
        assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_hard_cases(name: str, dtype: torch.dtype) -> None:
    assert_as_good_as_plain(Case(**CASES[name], dtype=dtype))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_sums_of_several_chunks(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.ops.grouped.autograd.FACTOR_CHUNK", 16)
    assert_as_good_as_plain(Case([5, 0, 37, 16], 10, 7, (3, 18), shared=shared))


HOPPER_CASES: dict[str, dict[str, Any]] = {
    "base alone": {"sizes": [300, 0, 1, 128], "out_features": 512, "in_features": 256},
    "gate and up": {"sizes": [300, 0, 1, 127, 64, 65], "ranks": (16, 16)},
    "two ranks": {"sizes": [0, 5, 200, 0], "ranks": (5, 70)},
    "rank 128": {"sizes": [129, 200], "ranks": (128, 65)},
    "three pairs": {"sizes": [129, 200], "out_features": 768, "ranks": (2, 16, 3)},
    "three wide pairs": {"sizes": [129, 200], "out_features": 768, "ranks": (2, 128, 40)},
    "up alone": {"sizes": [129, 200], "ranks": (0, 8)},
    "gate alone": {"sizes": [129, 200], "ranks": (33, 0)},
    "shared a": {"sizes": [5, 0, 2500], "ranks": (16, 16), "shared": "a"},
    "shared b": {"sizes": [5, 0, 2500], "ranks": (16,), "shared": "b"},
    "own input": {"sizes": [130, 33], "ranks": (16, 3), "own_input": True},
    "one row": {"sizes": [0, 1, 0], "ranks": (16, 16)},
    "no rows": {"sizes": [0, 0, 0], "ranks": (16, 16)},
    "all in one group": {"sizes": [0, 4500, 0, 0], "ranks": (16, 16)},
    "many groups": {"sizes": [i % 5 for i in range(300)], "ranks": (16,)},
}


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_whole_tiles_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    sizes = {"out_features": 512, "in_features": 256} | HOPPER_CASES[name]
    assert_as_good_as_plain(Case(**sizes, dtype=dtype), repeat=True)


@random_shapes(25)
@given(data=st.data())
def test_random_shapes(data: st.DataObject, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("poisoned_empty")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    ranks = tuple(data.draw(st.lists(st.integers(0, 20), max_size=2), "ranks"))
    case = Case(
        data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3), "sizes"),
        max(1, len(ranks)) * data.draw(st.integers(1, 20), "out_features of a part"),
        data.draw(st.integers(1, 40), "in_features"),
        ranks,
        shared=data.draw(st.sampled_from(["", "a", "b", "ab"]), "shared"),
        own_input=any(ranks) and data.draw(st.booleans(), "own_input"),
    )
    assert_as_good_as_plain(case)
