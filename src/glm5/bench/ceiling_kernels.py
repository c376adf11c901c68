"""What L2 takes at best: rows read by index, and rows added to."""

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    table, rows, out, num_rows, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Each program sums num_rows rows of the table."""
    program = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, num_rows, TILE):
        row = tl.load(rows + program * num_rows + start + tl.arange(0, TILE))
        total += tl.load(table + row[:, None] * WIDTH + columns[None, :]).to(tl.float32)
    tl.store(out + program * WIDTH + columns, tl.sum(total, 0))


@triton.jit
def reduce_kernel(table, rows, num_rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Each program adds 1 to num_rows rows of the table, in fp32."""
    program = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    ones = tl.full([TILE, WIDTH], 1.0, tl.float32)
    for start in tl.range(0, num_rows, TILE):
        row = tl.load(rows + program * num_rows + start + tl.arange(0, TILE))
        tl.atomic_add(table + row[:, None] * WIDTH + columns[None, :], ones, sem="relaxed")
