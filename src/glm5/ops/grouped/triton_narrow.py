"""Products of many columns with few: what the pairs' low-rank side is made of."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.grouped.triton_factors import (
    Factors,
    is_interpreted,
    pair_factor,
    part_of_pair,
    slot_rows,
)
from glm5.ops.grouped.triton_tiles import RowTiles


@triton.jit
def _narrow_kernel(
    x_ptr, low_ptr, table_ptr, count_ptr, scales,
    factors, ranks, group_strides, parts,
    x_columns, k_columns, num_slots,
    RANK: tl.constexpr, IS_A: tl.constexpr, SLOTS: tl.constexpr,
    PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // PIECES
    # Entries that nobody wrote are read, but not used.
    first = tl.load(table_ptr + tile * 4 + 1) + tl.program_id(0) % PIECES * BLOCK_M
    last = tl.load(table_ptr + tile * 4 + 2)
    if (tile < tl.load(count_ptr)) & (first < last):
        group = tl.load(table_ptr + tile * 4)
        rows = first + tl.arange(0, BLOCK_M)
        pair = tl.program_id(1)
        slots = pair * RANK + tl.arange(0, SLOTS)
        in_k = tl.arange(0, BLOCK_K)
        is_row = rows[:, None] < last
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_columns
        acc = tl.zeros([BLOCK_M, SLOTS], tl.float32)
        if IS_A:
            factor_rows, valid = slot_rows(
                factors, ranks, group_strides, group, slots, k_columns, RANK
            )
            for k in tl.range(0, k_columns, BLOCK_K):
                is_k = k + in_k < k_columns
                x = tl.load(x_rows + (k + in_k)[None, :], mask=is_row & is_k[None, :], other=0.0)
                factor = tl.load(
                    factor_rows[:, None] + (k + in_k)[None, :],
                    mask=valid[:, None] & is_k[None, :], other=0.0,
                )  # fmt: skip
                if UPCAST:
                    x, factor = x.to(tl.float32), factor.to(tl.float32)
                acc = tl.dot(x, factor.T, acc, input_precision="ieee")
        else:
            factor_ptr, rank = pair_factor(factors, ranks, group_strides, group, pair)
            in_rank = tl.arange(0, SLOTS)
            x_rows += part_of_pair(pair, parts) * k_columns
            for k in tl.range(0, k_columns, BLOCK_K):
                is_k = k + in_k < k_columns
                x = tl.load(x_rows + (k + in_k)[None, :], mask=is_row & is_k[None, :], other=0.0)
                factor = tl.load(
                    factor_ptr + (k + in_k)[:, None] * rank + in_rank[None, :],
                    mask=is_k[:, None] & (in_rank[None, :] < rank), other=0.0,
                )  # fmt: skip
                if UPCAST:
                    x, factor = x.to(tl.float32), factor.to(tl.float32)
                acc = tl.dot(x, factor, acc, input_precision="ieee")
        scale = tl.zeros([SLOTS], tl.float32)
        for p in tl.static_range(0, len(scales)):
            scale = tl.where(slots // RANK == p, scales[p], scale)
        tl.store(
            low_ptr + rows.to(tl.int64)[:, None] * num_slots + slots[None, :],
            (acc * scale[None, :]).to(low_ptr.dtype.element_ty),
            mask=is_row & (slots[None, :] < num_slots),
        )


def narrow_product(x: Tensor, factors: Factors, tiles: RowTiles, *, is_a: bool) -> Tensor:
    """low = scale x a_g^T, or scale x[:, part] b_g of each pair's part, zeros in padded slots.

    x [t, in] with factors a, or x [t, out] with factors b, contiguous
    -> low [t, num_slots] in the dtype of x.
    """
    low = x.new_empty(len(x), factors.num_slots)
    if low.numel() == 0:
        return low
    num_pairs = len(factors.tensors)
    options = launch_options(x, factors, is_a=is_a, tile_rows=tiles.block)
    _narrow_kernel[(tiles.num_bound * options["PIECES"], 1 if is_a else num_pairs)](
        x, low, tiles.table, tiles.num_tiles, factors.scales,
        x_columns=x.shape[1], k_columns=factors.tensors[0].shape[2 if is_a else 1],
        num_slots=low.shape[1], **factors.kernel_arguments(), **options,
    )  # fmt: skip
    return low


def launch_options(x: Tensor, factors: Factors, *, is_a: bool, tile_rows: int) -> dict[str, Any]:
    """Sizes, programs of at most 64 rows for each tile, and the compiler's options."""
    num_pairs = len(factors.tensors) if is_a else 1
    slots = factors.padded_rank * triton.next_power_of_2(num_pairs)
    is_wide = x.element_size() == 2
    return {
        "IS_A": is_a,
        "SLOTS": slots,
        "PIECES": triton.cdiv(tile_rows, 64),
        "BLOCK_M": min(64, tile_rows),
        "BLOCK_K": 128 if is_wide and slots <= 64 else 64 if is_wide else 32,
        "UPCAST": is_interpreted(x),
        "num_warps": 4,
        "num_stages": 3,
    }
