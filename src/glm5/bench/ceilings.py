"""What the card can do at best, measured in the same process, and how near an operation comes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.bench.ceiling_kernels import gather_kernel, reduce_kernel
from glm5.bench.timing import interleaved_medians

_MATMUL_SIZE = 8192
_COPY_BYTES = 2**31
# Rows as wide as a latent key, in a table that stays in L2.
_WIDTH, _TABLE_ROWS, _PROGRAMS, _ROWS_PER_PROGRAM = 512, 8192, 4224, 2048
_TILE = 16


class Ceilings(NamedTuple):
    """Rates of the card: bf16 matrix products in FLOP/s; copies through HBM (read and written),
    bf16 rows gathered from L2, and fp32 sums into L2, each in bytes/s."""

    matmul: float
    copy: float
    gather: float
    reduce: float


class Work(NamedTuple):
    """What an operation has to do: FLOP on valid pairs, bytes that pass HBM once, bytes gathered
    from L2, bytes summed into L2."""

    flops: int
    moved: int = 0
    gathered: int = 0
    reduced: int = 0

    def floor(self, ceilings: Ceilings) -> tuple[float, str]:
        """Milliseconds below which the card cannot do it, and the ceiling that says so."""
        amounts = (self.flops, self.moved, self.gathered, self.reduced)
        seconds = [amount / rate for amount, rate in zip(amounts, ceilings, strict=True)]
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return 1e3 * seconds[slowest], Ceilings._fields[slowest]


def measure_ceilings() -> Ceilings:
    """All four, on the current GPU: about a second."""
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    shape = (_PROGRAMS, _ROWS_PER_PROGRAM)
    rows = torch.randint(0, _TABLE_ROWS, shape, device="cuda", dtype=torch.int32)
    keys = torch.randn(_TABLE_ROWS, _WIDTH, device="cuda").bfloat16()
    sums = torch.zeros(_TABLE_ROWS, _WIDTH, device="cuda")
    out = torch.empty(_PROGRAMS, _WIDTH, device="cuda")
    options: dict[str, Any] = {"WIDTH": _WIDTH, "TILE": _TILE, "num_warps": 8}

    def gather(num_rows: int = _ROWS_PER_PROGRAM) -> Tensor:
        gather_kernel[(_PROGRAMS,)](keys, rows, out, num_rows, num_stages=4, **options)
        return out

    def reduce() -> None:
        reduce_kernel[(_PROGRAMS,)](sums, rows, _ROWS_PER_PROGRAM, **options)

    _check(gather(), keys, rows, reduce, sums)
    times = interleaved_medians(
        {
            "matmul": lambda: a @ b,
            "copy": lambda: target.copy_(source),
            "gather": gather,
            "reduce": reduce,
        },
        rounds=20,
    )
    elements = rows.numel() * _WIDTH
    amounts = (2 * _MATMUL_SIZE**3, 2 * _COPY_BYTES, 2 * elements, 4 * elements)
    return Ceilings(*(n / times[name] * 1e3 for name, n in zip(times, amounts, strict=True)))


def _check(gathered: Tensor, keys: Tensor, rows: Tensor, reduce: Any, sums: Tensor) -> None:
    expected = keys.double()[rows[0].long()].sum(0)
    assert torch.allclose(gathered[0].double(), expected, atol=1e-2), "the gather is wrong"
    reduce()
    counts = torch.bincount(rows.flatten(), minlength=len(keys))
    assert torch.equal(sums[:, 0], counts.float()), "the reduction is wrong"
