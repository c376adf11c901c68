"""Writes a result of the tensor cores to memory in whole lines."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store_heads(acc, stage, target, num_heads, width: gl.constexpr, row_length: gl.constexpr):
    """Write acc [64, width] as bf16 to the rows of num_heads heads, by four warps.

    It passes through stage [64, width] in shared memory, which nobody else may be using.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    stage.store(acc.to(gl.bfloat16))
    gl.thread_barrier()
    gl.store(
        target + heads[:, None] * row_length + columns[None, :],
        stage.load(layout),
        mask=(heads < num_heads)[:, None],
    )
