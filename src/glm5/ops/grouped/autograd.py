"""The grouped linear of the fused kernels, and its gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.grouped.inputs import GroupedPair
from glm5.ops.grouped.matmul import grouped_product
from glm5.ops.grouped.triton_factors import Factors
from glm5.ops.grouped.triton_narrow import narrow_block, narrow_product
from glm5.ops.grouped.triton_sums import row_sums, sum_chunk
from glm5.ops.grouped.triton_tiles import RowTiles


def grouped_linear_fused(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    pairs: Sequence[GroupedPair | None] = (),
    pair_input: Tensor | None = None,
) -> Tensor:
    """See grouped_linear. Products take the dtype of x and are summed in fp32 in a fixed order.

    Kept for the backward: weight, factors and `ends`; of the activations the pairs' low-rank side
    [t, pairs * padded rank], and x (or pair_input) where a factor or the weight is trained.
    """
    given = [(part, pair) for part, pair in enumerate(pairs) if pair is not None]
    form = _Form(
        num_parts=max(1, len(pairs)) if given else 1,
        parts=tuple(part for part, _ in given),
        scales=tuple(float(pair.scale) for _, pair in given),
    )
    a, b = [pair.a for _, pair in given], [pair.b for _, pair in given]
    return _GroupedLinearFunction.apply(form, x, weight, ends, pair_input, *a, *b)


class _Form(NamedTuple):
    """How many equal parts the out_features have, and which of them have a pair, with its scale."""

    num_parts: int
    parts: tuple[int, ...]
    scales: tuple[float, ...]

    def factors(self, tensors: Sequence[Tensor], ranks: Sequence[int]) -> Factors:
        return Factors.of(tensors, ranks, self.parts, self.scales)


class _GroupedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: _Form,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        pair_input: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        n, out_features, _ = weight.shape
        a, b = _sides(form, factors)
        pair_input = None if pair_input is None else pair_input.contiguous()
        low = None
        if form.parts:
            seen = x if pair_input is None else pair_input
            low = narrow_product(seen, a, RowTiles.of(ends, len(x), narrow_block(x)), is_a=True)
        y = grouped_product(
            x, weight, ends, n, low, b, (len(x), out_features),
            forward=True, num_parts=form.num_parts,
        )  # fmt: skip
        needs = _Needs.of(ctx.needs_input_grad, len(form.parts))
        ctx.form = form
        ctx.save_for_backward(
            x if needs.weight or (needs.a and pair_input is None) else None,
            pair_input if needs.a else None,
            weight, ends, low if needs.b else None, *factors,
        )  # fmt: skip
        ctx.shape = x.shape
        ctx.has_own_input = pair_input is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pair_input, weight, ends, low, *factors = ctx.saved_tensors
        form, needs = ctx.form, _Needs.of(ctx.needs_input_grad, len(ctx.form.parts))
        grad = grad.contiguous()
        a, b = _sides(form, factors)
        seen = pair_input if ctx.has_own_input else x
        seen_needs = needs.pair_input if ctx.has_own_input else needs.x
        grad_low = None
        if form.parts and (needs.a or seen_needs):
            tiles = RowTiles.of(ends, len(grad), narrow_block(grad))
            grad_low = narrow_product(grad, b, tiles, is_a=False)
        grad_x, grad_seen = _input_grads(ctx, needs, grad, weight, ends, grad_low, a)
        grad_weight = None
        if needs.weight:
            grad_weight = torch.empty_like(weight)
            chunks = RowTiles.of(ends, len(grad), sum_chunk(weight.shape[2]))
            row_sums(grad, x, ends, grad_weight, chunks)
        grad_a: list[Tensor | None] = [None] * len(form.parts)
        grad_b: list[Tensor | None] = [None] * len(form.parts)
        if needs.a or needs.b:
            sums = _FactorSums(ends, len(grad))
            if needs.a:
                assert grad_low is not None, "made above"
                grad_a = [
                    sums.of(seen, _slots(grad_low, a, p), y.shape, flip=True)
                    for p, y in enumerate(a.tensors)
                ]
            if needs.b:
                rows = grad.shape[1] // form.num_parts
                grad_b = [
                    sums.of(
                        grad[:, part * rows : (part + 1) * rows], _slots(low, b, p),
                        b.tensors[p].shape, flip=False,
                    )
                    for p, part in enumerate(form.parts)
                ]  # fmt: skip
        return None, grad_x, grad_weight, None, grad_seen, *grad_a, *grad_b


class _Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    pair_input: bool
    a: bool
    b: bool

    @classmethod
    def of(cls, asked: Sequence[bool], num_pairs: int) -> "_Needs":
        _, x, weight, _, pair_input, *factors = asked
        return cls(x, weight, pair_input, any(factors[:num_pairs]), any(factors[num_pairs:]))


def _sides(form: _Form, factors: Sequence[Tensor]) -> tuple[Factors, Factors]:
    """Factors a and b of all pairs."""
    a, b = factors[: len(form.parts)], factors[len(form.parts) :]
    ranks = [x.shape[1] for x in a]
    return form.factors(a, ranks), form.factors(b, ranks)


def _slots(low: Tensor, factors: Factors, pair: int) -> Tensor:
    """The columns of one pair."""
    first = pair * factors.padded_rank
    return low[:, first : first + factors.ranks[pair]]


def _input_grads(
    ctx: Any, needs: _Needs, grad: Tensor, weight: Tensor, ends: Tensor, grad_low: Tensor | None,
    a: Factors,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x and of pair_input; where both are one tensor, in one product."""
    grad_x = grad_seen = None

    def product(weight: Tensor | None, low: Tensor | None) -> Tensor:
        factors = None if low is None else a
        return grouped_product(
            grad, weight, ends, len(ends), low, factors, ctx.shape, forward=False, num_parts=1
        )

    if needs.x:
        grad_x = product(weight, None if ctx.has_own_input else grad_low)
    if ctx.has_own_input and needs.pair_input:
        grad_seen = product(None, grad_low)
    return grad_x, grad_seen


class _FactorSums:
    """Gradients of factors: per group, or of one factor that all rows share."""

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        self._ends = ends
        self._num_rows = num_rows
        self._chunks: dict[bool, tuple[Tensor, RowTiles]] = {}

    def of(self, wide: Tensor, narrow: Tensor, shape: torch.Size, *, flip: bool) -> Tensor:
        """wide_g^T narrow_g in the shape [n or 1, ...], transposed if flip."""
        is_shared = shape[0] == 1
        if is_shared not in self._chunks:
            ends = self._ends[-1:] if is_shared else self._ends
            tiles = RowTiles.of(ends, self._num_rows, sum_chunk(narrow.shape[1]))
            self._chunks[is_shared] = ends, tiles
        ends, tiles = self._chunks[is_shared]
        out = wide.new_empty(shape)
        row_sums(wide, narrow, ends, out.transpose(1, 2) if flip else out, tiles)
        return out
