"""Frozen float8 linears against bf16 ones: forward and input gradients, on one Hopper GPU.

    python -m benchmarks.frozen_linears [--tokens 8192] [--json FILE]

GLM-5.2's width, 32 local experts with 8 routed rows a token: `even` as a balanced router sends
them, `skewed` from half to one and a half of that, and the rest to the last one. The base is the
same product with a bf16 weight: ours for experts, PyTorch's for dense linears. Every exact product
is first checked to have the base's values (experts: its bits).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.bench.timing import interleaved_medians
from glm5.ops.block_scaled import BLOCK, FP8_DTYPE, FP8_MAX, BlockScaled
from glm5.ops.grouped import grouped_linear

DEVICE = torch.device("cuda")
KINDS = ("base", "exact", "fp8")


@dataclass(frozen=True)
class Case:
    """A linear [outputs, inputs], of each of `experts`; `in_layer`: one of those of a MoE layer."""

    name: str
    outputs: int
    inputs: int
    experts: int = 1
    is_even: bool = True
    in_layer: bool = True


CASES = (
    Case("experts fc1, even", 4096, 6144, 32),
    Case("experts fc2, even", 6144, 2048, 32),
    Case("experts fc1, skewed", 4096, 6144, 32, is_even=False, in_layer=False),
    Case("experts fc2, skewed", 6144, 2048, 32, is_even=False, in_layer=False),
    Case("q_a", 2048, 6144),
    Case("q_b", 16384, 2048),
    Case("kv_a", 576, 6144),
    Case("o_proj", 6144, 16384),
    Case("shared fc1", 4096, 6144),
    Case("shared fc2", 6144, 2048),
    Case("dense fc1", 24576, 6144, in_layer=False),
    Case("dense fc2", 6144, 12288, in_layer=False),
)


def measure(case: Case, tokens: int) -> dict[str, float]:
    """Milliseconds of each kind, forward and backward."""
    weight = _weight(case)
    rounded = weight.dequantise(torch.bfloat16)
    rows = tokens * 8 if case.experts > 1 else tokens
    ends = _ends(case, rows)
    x, grad = (
        torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
        for width in (case.inputs, case.outputs)
    )

    def run(kind: str, x: Tensor) -> Tensor:
        if kind != "base":
            return grouped_linear(x, weight, ends, fp8_compute=kind == "fp8")
        return F.linear(x, rounded[0]) if case.experts == 1 else grouped_linear(x, rounded, ends)

    leaf = x.clone().requires_grad_()
    outputs = {kind: run(kind, leaf) for kind in KINDS}
    _check(case, outputs)
    forward = {f"{kind} forward": lambda kind=kind: run(kind, x) for kind in KINDS}
    backward = {
        f"{kind} backward": lambda y=y: torch.autograd.grad(y, leaf, grad, retain_graph=True)
        for kind, y in outputs.items()
    }
    return interleaved_medians(forward | backward, rounds=7)


def _weight(case: Case) -> BlockScaled:
    shape = (case.experts, case.outputs, case.inputs)
    values = torch.randn(shape, device=DEVICE).mul_(80).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    grid = (-(-size // step) for size, step in zip(shape[1:], BLOCK, strict=True))
    return BlockScaled(values, torch.rand(case.experts, *grid, device=DEVICE) * 1e-3 + 5e-4)


def _ends(case: Case, rows: int) -> Tensor:
    if case.is_even:
        chosen = torch.randint(case.experts, (rows,))
        sizes = torch.bincount(chosen, minlength=case.experts)
    else:
        mean = rows // case.experts
        sizes = torch.randint(mean // 2, mean * 3 // 2, (case.experts,))
        sizes[-1] = max(0, rows - int(sizes[:-1].sum()))
        sizes[0] += rows - int(sizes.sum())
    return sizes.cumsum(0).int().to(DEVICE)


def _check(case: Case, outputs: dict[str, Tensor]) -> None:
    base, exact = outputs["base"].detach(), outputs["exact"].detach()
    if case.experts > 1:
        assert torch.equal(exact, base), f"{case.name}: other bits than the bf16 weight gives"
    error = (exact.float() - base.float()).norm() / base.float().norm()
    assert error < torch.finfo(torch.bfloat16).eps, f"{case.name}: {error}"


def totals(times: dict[str, float]) -> dict[str, float]:
    """Forward and backward of each kind."""
    return {kind: times[f"{kind} forward"] + times[f"{kind} backward"] for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also append a line for each case to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    layer = dict.fromkeys(KINDS, 0.0)
    print(f"{'':20s} {'base ms':>8s} {'exact':>7s} {'fp8':>7s}   forward + backward, ms each")
    for case in CASES:
        times = measure(case, options.tokens)
        total = totals(times)
        if case.in_layer:
            layer = {kind: layer[kind] + total[kind] for kind in KINDS}
        _tell(case.name, total, times)
        if options.json:
            _note(options.json, case, options.tokens, times)
        torch.cuda.empty_cache()
    _tell("all of a MoE layer", layer, {})


def _tell(name: str, total: dict[str, float], times: dict[str, float]) -> None:
    parts = "  ".join(
        f"{times[f'{kind} forward']:.3f} + {times[f'{kind} backward']:.3f}"
        for kind in KINDS
        if times
    )
    ratios = (total[kind] / total["base"] for kind in ("exact", "fp8"))
    print(f"{name:20s} {total['base']:8.3f} {next(ratios):6.3f}x {next(ratios):6.3f}x   {parts}")


def _note(file: Path, case: Case, tokens: int, times: dict[str, float]) -> None:
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": "python -m benchmarks.frozen_linears",
        "op": "frozen_linear",
        "case": case.name,
        "tokens": tokens,
        "ms": times,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
