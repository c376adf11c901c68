"""Copies selected keys into shared memory without waiting for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def key_rows(kv, indices, start, length, num_warps: gl.constexpr):
    """Pointers to the rows of keys indices[start : start + 64], for copy_rows.

    kv [t_k, 576] bf16, indices one row of topk_indices, length its row length. Where there is no
    key, the row of key 0: the caller masks it, and its memory is finite, which stale memory
    need not be.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    places = start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    keys = gl.load(indices + places, mask=places < length, other=0)
    return kv + gl.maximum(keys, 0).to(gl.int64) * 576


@gluon.jit
def copy_rows(rows, k_v, k_tail, num_warps: gl.constexpr):
    """Begin to copy 64 rows of 576 into k_v [64, 512] and k_tail [64, 64].

    The caller commits or signals the copies.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    tail_columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(k_v, rows[:, None] + columns[None, :])
    async_copy.async_copy_global_to_shared(k_tail, rows[:, None] + 512 + tail_columns[None, :])
