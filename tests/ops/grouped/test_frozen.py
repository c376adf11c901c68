"""Grouped linears with block-scaled weights; without a GPU in Triton's interpreter."""

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.block_scaled import BLOCK, BlockScaled, quantise
from glm5.ops.block_scaled.quantise import quantise_rows
from glm5.ops.frozen_linear import frozen_linear
from glm5.ops.grouped import GroupedPair, grouped_linear
from glm5.ops.grouped.autograd import grouped_linear_fused
from glm5.ops.grouped.hopper import fits_hopper
from glm5.ops.grouped.reference import grouped_linear_reference
from glm5.ops.grouped.triton_rows import PIECE, quantise_rows_fused
from glm5.ops.grouped.triton_tiles import RowTiles
from tests.ops.random_shapes import random_shapes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the tensor cores' sums of 128 float8 products, which keep about 13 bits of the largest one.
FP8_SUM_EPS = 2.0**-10


class FrozenCase:
    """Random tensors of a grouped linear with a frozen weight whose blocks differ in size a lot."""

    def __init__(
        self, sizes: list[int], out_features: int, in_features: int, ranks: tuple[int, ...] = (),
        *, block: tuple[int, int] = BLOCK, own_input: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        n, t = len(sizes), sum(sizes)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)

        self.ends = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
        magnitudes = 2 ** torch.randint(-4, 4, (n, out_features, 1), device=DEVICE).float()
        self.weight = quantise(draw(n, out_features, in_features, scale=0.05) * magnitudes, block)
        # a real row has outliers
        outliers = 1 + 20 * (torch.rand(t, in_features, device=DEVICE) < 0.01)
        self.x = draw(t, in_features) * outliers.to(dtype)
        self.pair_input = draw(t, in_features) if own_input else None
        self.grad = draw(t, out_features)
        rows = out_features // max(1, len(ranks))
        self.pairs = [
            GroupedPair(draw(n, rank, in_features, scale=0.05), draw(n, rows, rank), 0.5 + i)
            if rank
            else None
            for i, rank in enumerate(ranks)
        ]

    def run(self, function: Any, weight: Any, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
        """The output and the gradients of everything that trains, computed in the dtype."""

        def leaf(x: Tensor | None) -> Any:
            return None if x is None else x.to(dtype).requires_grad_()

        x, seen = leaf(self.x), leaf(self.pair_input)
        pairs = [p and GroupedPair(leaf(p.a), leaf(p.b), p.scale) for p in self.pairs]
        leaves = {"x": x} | ({} if seen is None else {"pair_input": seen})
        for i, pair in enumerate(pairs):
            if pair is not None:
                leaves |= {f"a{i}": pair.a, f"b{i}": pair.b}
        y = function(x, weight, self.ends, pairs, seen, **options)
        grads = torch.autograd.grad(y, list(leaves.values()), self.grad.to(dtype))
        return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


def assert_exact(case: FrozenCase) -> None:
    """Against fp64 at most twice the error of plain PyTorch on the dequantised weight."""
    dtype = case.x.dtype
    rounded = case.weight.dequantise(dtype)
    exact = case.run(grouped_linear_reference, rounded.double(), torch.float64)
    plain = case.run(grouped_linear_reference, rounded, dtype)
    ours = case.run(grouped_linear_fused, case.weight, dtype)
    again = case.run(grouped_linear_fused, case.weight, dtype)
    for name, true in exact.items():
        if true.numel() == 0:
            continue
        eps = torch.finfo(dtype).eps + 32 * torch.finfo(torch.float32).eps
        my_error, their_error = ((z[name].double() - true).abs().max() for z in (ours, plain))
        assert my_error <= 2 * their_error + eps * true.abs().max(), name
        assert torch.equal(ours[name], again[name]), name


def assert_quantised(case: FrozenCase) -> None:
    """Against the reference, which sums in fp32: rounding, and that of the tensor cores' sums."""
    dtype = case.x.dtype
    true = case.run(grouped_linear_reference, case.weight, dtype, fp8_compute=True)
    ours = case.run(grouped_linear_fused, case.weight, dtype, fp8_compute=True)
    plain = case.run(grouped_linear_reference, case.weight, dtype)
    for name, expected in true.items():
        if expected.numel() == 0:
            continue
        error, size = (ours[name].double() - expected.double()), expected.double()
        allowed = 2 * torch.finfo(dtype).eps + FP8_SUM_EPS
        assert error.norm() <= allowed * size.norm(), name
        assert error.abs().max() <= 16 * allowed * size.abs().max(), name
    if len(case.x) > 8:
        # the quantised product is another one than the exact one
        difference = (true["y"].double() - plain["y"].double()).norm()
        assert difference > 1e-3 * plain["y"].double().norm()


CASES: dict[str, dict[str, Any]] = {
    "one ragged block": {"sizes": [3, 0, 40], "out_features": 24, "in_features": 40},
    "several blocks": {"sizes": [9], "out_features": 200, "in_features": 144},
    "fine blocks": {"sizes": [5, 9], "out_features": 40, "in_features": 48, "block": (16, 24)},
    "odd blocks": {"sizes": [5, 9], "out_features": 33, "in_features": 19, "block": (7, 5)},
    "pairs": {"sizes": [5, 0, 9], "out_features": 34, "in_features": 24, "ranks": (3, 20)},
    "own input": {"sizes": [5, 3], "out_features": 12, "in_features": 24, "ranks": (3, 2)}
    | {"own_input": True},
    "no rows": {"sizes": [0, 0], "out_features": 8, "in_features": 16, "ranks": (3, 2)},
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_hard_cases(name: str, dtype: torch.dtype) -> None:
    case = FrozenCase(**CASES[name], dtype=dtype)
    assert_exact(case)
    assert_quantised(case)


HOPPER_CASES: dict[str, dict[str, Any]] = {
    "base alone": {"sizes": [300, 0, 1, 128]},
    "gate and up": {"sizes": [300, 0, 1, 127, 64, 65], "ranks": (16, 16)},
    "two ranks": {"sizes": [0, 5, 200, 0], "ranks": (5, 70)},
    "rank 128": {"sizes": [129, 200], "ranks": (128, 65)},
    "up alone": {"sizes": [129, 200], "ranks": (0, 8)},
    "own input": {"sizes": [130, 33], "ranks": (16, 3), "own_input": True},
    "one row": {"sizes": [0, 1, 0], "ranks": (16, 16)},
    "no rows": {"sizes": [0, 0, 0]},
    "all in one group": {"sizes": [0, 4500, 0, 0], "ranks": (16, 16)},
    "deep": {"sizes": [700, 400], "out_features": 1024, "in_features": 2048},
    "576 outputs": {"sizes": [300], "out_features": 576, "in_features": 768},
    "576 outputs, a pair": {
        "sizes": [300],
        "out_features": 576,
        "in_features": 768,
        "ranks": (16,),
    },
    "128 outputs": {"sizes": [131], "out_features": 128, "in_features": 512},
    "ragged both ways": {"sizes": [77], "out_features": 328, "in_features": 208},
    "ragged both ways, a pair": {
        "sizes": [77],
        "out_features": 328,
        "in_features": 208,
        "ranks": (7,),
    },
    "half of a tile": {"sizes": [128, 129, 384], "ranks": (100, 128)},
    "ragged experts": {"sizes": [77, 50], "out_features": 328, "in_features": 208},
    "ragged gate and up, as wide as the input": {
        "sizes": [77],
        "out_features": 416,
        "in_features": 208,
        "ranks": (16, 16),
    },
}


@pytest.mark.parametrize(
    ("columns", "depth", "fits"), [(416, 208, True), (208, 416, True), (208, 208, False)]
)
def test_no_tile_crosses_from_one_part_into_the_next(columns: int, depth: int, fits: bool) -> None:
    """Forward with one part, the gradient of the input, and forward with two parts."""
    weight = FrozenCase([1], 416, 208).weight
    x = torch.empty(3, depth, dtype=torch.bfloat16, device=DEVICE)
    assert fits_hopper(x, weight, columns, None) == fits


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_whole_tiles_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    sizes = {"out_features": 512, "in_features": 256} | HOPPER_CASES[name]
    case = FrozenCase(**sizes, dtype=dtype)
    assert_exact(case)
    assert_quantised(case)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(), (16, 5)])
def test_exact_has_the_bits_of_the_dequantised_weight(ranks: tuple[int, ...]) -> None:
    case = FrozenCase([300, 0, 1, 700], 1024, 768, ranks, dtype=torch.bfloat16)
    rounded = case.weight.dequantise(torch.bfloat16)
    ours = case.run(grouped_linear, case.weight, torch.bfloat16)
    theirs = case.run(grouped_linear, rounded, torch.bfloat16)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Triton's interpreter loses the carry where rounding to float8 reaches the next power of two.
@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns", [256, 200])
def test_rows_are_quantised_as_by_the_reference(columns: int, turned: bool) -> None:
    x = torch.randn(37, columns, device=DEVICE).to(torch.bfloat16)
    x[3, :128] = 0
    values, scales = quantise_rows(x, PIECE)
    ends = torch.tensor([7, 7, 37], dtype=torch.int32, device=DEVICE)
    fused = quantise_rows_fused(x, RowTiles.of(ends, 37, 64), turned=turned)
    assert torch.equal(fused.scales[:, :7].t(), scales[:7])
    assert torch.equal(fused.scales[:, 64:94].t(), scales[7:])
    pieces = fused.values.float().view(37, -1, PIECE)
    if turned:
        pieces = pieces.unflatten(-1, (PIECE // 4, 4)).transpose(-1, -2).flatten(-2)
    laid = pieces.flatten(-2)
    assert torch.equal(laid[:, :columns], values.float())
    assert not laid[:, columns:].any()


@random_shapes(25)
@given(data=st.data())
def test_random_shapes(data: st.DataObject, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("poisoned_empty")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    ranks = tuple(data.draw(st.lists(st.integers(0, 20), max_size=2), "ranks"))
    case = FrozenCase(
        data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3), "sizes"),
        max(1, len(ranks)) * data.draw(st.integers(1, 20), "out_features of a part"),
        data.draw(st.integers(1, 40), "in_features"),
        ranks,
        block=data.draw(st.sampled_from([BLOCK, (4, 8), (128, 16)]), "block"),
        own_input=any(ranks) and data.draw(st.booleans(), "own_input"),
    )
    assert_exact(case)


@pytest.mark.parametrize("fp8_compute", [False, True])
def test_frozen_linear_is_the_linear_of_one_group(fp8_compute: bool) -> None:
    case = FrozenCase([10], 136, 72, dtype=torch.bfloat16)
    weight = BlockScaled(case.weight.values[0], case.weight.scales[0])
    x = case.x.view(2, 5, 72)
    y = frozen_linear(x, weight, fp8_compute=fp8_compute)
    expected = grouped_linear(case.x, case.weight, case.ends, fp8_compute=fp8_compute)
    assert torch.equal(y.view(10, 136), expected)
