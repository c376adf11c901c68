"""Copies selected keys into shared memory without waiting for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def key_rows(kv, indices, start, length):
    """Pointers to the rows of keys indices[start : start + 64], and where there is a key.

    kv [t_k, 576] bf16, indices one row of topk_indices, length its row length.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    places = start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    keys = gl.load(indices + places, mask=places < length, other=-1)
    return kv + gl.maximum(keys, 0).to(gl.int64) * 576, keys >= 0


@gluon.jit
def copy_columns(rows, is_key, target, first: gl.constexpr, num_columns: gl.constexpr):
    """Begin to copy columns first.. of 64 rows into target [64, num_columns]; zeros without a key.

    By four warps. The caller commits or signals the copies.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = first + gl.arange(0, num_columns, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        target, rows[:, None] + columns[None, :], mask=is_key[:, None]
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
