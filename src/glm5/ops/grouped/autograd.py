"""The grouped linear of the fused kernels, and its gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.block_scaled import BlockScaled
from glm5.ops.grouped.inputs import GroupedPair
from glm5.ops.grouped.matmul import grouped_product, row_tiles
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_narrow import narrow_product
from glm5.ops.grouped.triton_sums import FACTOR_CHUNK, row_sums
from glm5.ops.grouped.triton_tiles import RowTiles
from glm5.ops.grouped.weight_grads import weight_grads


def grouped_linear_fused(
    x: Tensor,
    weight: Tensor | BlockScaled,
    ends: Tensor,
    pairs: Sequence[GroupedPair | None] = (),
    pair_input: Tensor | None = None,
    *,
    fp8_compute: bool = False,
) -> Tensor:
    """See grouped_linear. Products take the dtype of x and are summed in fp32 in a fixed order.

    Kept for the backward: weight, factors, and the table of tiles (16 bytes for each 128 rows and
    for each group); of the activations the pairs' low-rank side [t, pairs * padded rank], and x (or
    pair_input) where a factor or the weight is trained.
    """
    given = [(part, pair) for part, pair in enumerate(pairs) if pair is not None]
    form = _Form(
        num_parts=max(1, len(pairs)) if given else 1,
        parts=tuple(part for part, _ in given),
        scales=tuple(float(pair.scale) for _, pair in given),
        block=weight.block if isinstance(weight, BlockScaled) else None,
        fp8_compute=fp8_compute,
    )
    tensors = (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight, None)
    a, b = [pair.a for _, pair in given], [pair.b for _, pair in given]
    return _GroupedLinearFunction.apply(form, x, *tensors, ends, pair_input, *a, *b)


class _Form(NamedTuple):
    """How many equal parts the out_features have, which of them have a pair, with its scale, and
    the blocks of a block-scaled weight."""

    num_parts: int
    parts: tuple[int, ...]
    scales: tuple[float, ...]
    block: tuple[int, int] | None
    fp8_compute: bool

    def weight(self, values: Tensor, scales: Tensor | None) -> Tensor | BlockScaled:
        """The weight that these tensors are."""
        if self.block is None or scales is None:
            return values.contiguous()
        return BlockScaled(values, scales, self.block).contiguous()

    def factors(self, tensors: Sequence[Tensor], ranks: Sequence[int]) -> Factors:
        return Factors.of(tensors, ranks, self.parts, self.scales)


class _GroupedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: _Form,
        x: Tensor,
        values: Tensor,
        scales: Tensor | None,
        ends: Tensor,
        pair_input: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        x, weight = x.contiguous(), form.weight(values, scales)
        a, b = _sides(form, factors)
        pair_input = None if pair_input is None else pair_input.contiguous()
        tiles = row_tiles(x, ends)
        low = None
        if form.parts:
            low = narrow_product(x if pair_input is None else pair_input, a, tiles, is_a=True)
        y = grouped_product(
            x, weight, tiles, low, b, (len(x), weight.shape[1]),
            forward=True, num_parts=form.num_parts, fp8_compute=form.fp8_compute,
        )  # fmt: skip
        needs = _Needs.of(ctx.needs_input_grad, len(form.parts))
        ctx.form, ctx.tiles = form, tiles
        ctx.save_for_backward(
            x if needs.weight or (needs.a and pair_input is None) else None,
            pair_input if needs.a else None,
            values, scales, low if needs.b else None, *factors,
        )  # fmt: skip
        ctx.shape = x.shape
        ctx.has_own_input = pair_input is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pair_input, values, scales, low, *factors = ctx.saved_tensors
        form, tiles = ctx.form, ctx.tiles
        weight = form.weight(values, scales)
        needs = _Needs.of(ctx.needs_input_grad, len(form.parts))
        grad = grad.contiguous()
        a, b = _sides(form, factors)
        seen = pair_input if ctx.has_own_input else x
        seen_needs = needs.pair_input if ctx.has_own_input else needs.x
        grad_low = None
        if form.parts and (needs.a or seen_needs):
            grad_low = narrow_product(grad, b, tiles, is_a=False)
        grad_x, grad_seen = _input_grads(ctx, needs, grad, weight, grad_low, a)
        grad_weight = weight_grads(grad, x, tiles.ends) if needs.weight else None
        grad_a: Sequence[Tensor | None] = [None] * len(form.parts)
        grad_b: Sequence[Tensor | None] = [None] * len(form.parts)
        chunks = _Chunks(tiles.ends, len(grad))
        if needs.a:
            assert grad_low is not None, "made above"
            grad_a = _factor_grads(seen, grad_low, a, chunks, is_a=True)
        if needs.b:
            grad_b = _factor_grads(grad, low, b, chunks, is_a=False)
        return None, grad_x, grad_weight, None, None, grad_seen, *grad_a, *grad_b


class _Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    pair_input: bool
    a: bool
    b: bool

    @classmethod
    def of(cls, asked: Sequence[bool], num_pairs: int) -> "_Needs":
        _, x, weight, _, _, pair_input, *factors = asked
        return cls(x, weight, pair_input, any(factors[:num_pairs]), any(factors[num_pairs:]))


def _sides(form: _Form, factors: Sequence[Tensor]) -> tuple[Factors, Factors]:
    """Factors a and b of all pairs."""
    a, b = factors[: len(form.parts)], factors[len(form.parts) :]
    ranks = [x.shape[1] for x in a]
    return form.factors(a, ranks), form.factors(b, ranks)


def _input_grads(
    ctx: Any, needs: _Needs, grad: Tensor, weight: Tensor | BlockScaled, grad_low: Tensor | None,
    a: Factors,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x and of pair_input; where both are one tensor, in one product."""
    grad_x = grad_seen = None

    def product(weight: Tensor | BlockScaled | None, low: Tensor | None) -> Tensor:
        factors = None if low is None else a
        return grouped_product(
            grad, weight, ctx.tiles, low, factors, ctx.shape,
            forward=False, num_parts=1, fp8_compute=ctx.form.fp8_compute,
        )  # fmt: skip

    if needs.x:
        grad_x = product(weight, None if ctx.has_own_input else grad_low)
    if ctx.has_own_input and needs.pair_input:
        grad_seen = product(None, grad_low)
    return grad_x, grad_seen


class _Chunks:
    """Chunks of rows whose sums are gradients of factors, made once for each kind of factor."""

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        self._ends = ends
        self._num_rows = num_rows
        self._made: dict[int, RowTiles] = {}

    def of(self, factors: Factors) -> RowTiles:
        """Those of every group, or of all rows where the groups share the factors."""
        ends = self._ends[-1:] if factors.is_shared else self._ends
        if len(ends) not in self._made:
            chunks = RowTiles.of(ends, self._num_rows, FACTOR_CHUNK, keep_empty=True)
            self._made[len(ends)] = chunks
        return self._made[len(ends)]


def _factor_grads(
    wide: Tensor, low: Tensor, factors: Factors, chunks: _Chunks, *, is_a: bool
) -> tuple[Tensor, ...]:
    """Gradients of one side of all pairs; see row_sums."""
    grads = tuple(torch.empty_like(x) for x in factors.tensors)
    row_sums(wide, low, factors._replace(tensors=grads), chunks.of(factors), is_a=is_a)
    return grads
