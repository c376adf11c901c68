"""Copies selected keys into shared memory without waiting for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def key_rows(kv, indices, start, length, num_warps: gl.constexpr):
    """Pointers to the rows of keys indices[start : start + 64], and where there is a key.

    kv [t_k, 576] bf16, indices one row of topk_indices, length its row length.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    places = start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    keys = gl.load(indices + places, mask=places < length, other=-1)
    return kv + gl.maximum(keys, 0).to(gl.int64) * 576, keys >= 0


@gluon.jit
def copy_rows(rows, is_key, k_v, k_tail, num_warps: gl.constexpr):
    """Begin to copy 64 rows of 576 into k_v [64, 512] and k_tail [64, 64]; zeros without a key.

    The caller commits or signals the copies.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    tail_columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    mask = is_key[:, None]
    async_copy.async_copy_global_to_shared(k_v, rows[:, None] + columns[None, :], mask=mask)
    async_copy.async_copy_global_to_shared(
        k_tail, rows[:, None] + 512 + tail_columns[None, :], mask=mask
    )


@gluon.jit
def copy_heads(source, num_heads, target, num_columns: gl.constexpr, row_length: gl.constexpr):
    """Begin to copy num_columns of each head's row to target, zeros for heads that do not exist."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, num_columns, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        target,
        source + heads[:, None] * row_length + columns[None, :],
        mask=(heads < num_heads)[:, None],
    )
