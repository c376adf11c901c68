"""Checks, then times sparse_mla of the backend "triton" on one GPU.

    python -m benchmarks.sparse_mla [--json FILE]

Error is ||ours - exact|| / ||exact||, exact in fp32, and may be at most twice that of the same
formula in bf16 PyTorch. No time is printed for an output that fails. TFLOP/s count valid
(query, key) pairs only: 2176 operations per pair and head forward, 5504 backward.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.selections import drifting, random_causal
from benchmarks.timing import interleaved_medians
from glm5.ops.sparse_mla import reference
from glm5.ops.sparse_mla.autograd import sparse_mla

D_QK, D_V, TOPK, SCALE = 576, 512, 2048, 1 / 16
Results = tuple[Tensor, Tensor, Tensor, Tensor]


class Case(NamedTuple):
    """One line of the table."""

    name: str
    num_heads: int
    t_q: int
    t_k: int
    select: Callable[[int, int, int], Tensor] = random_causal


CASES = [
    Case("8K, 64 heads", 64, 8192, 8192),
    Case("8K, 8 heads", 8, 8192, 8192),
    Case("1K of 8K, 64 heads", 64, 1024, 8192),
    Case("4K of 32K drifting", 64, 4096, 32768, drifting),
    Case("2K, 64 heads", 64, 2048, 2048),
]


def attend_in_bf16(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int):
    """Plain PyTorch in the inputs' dtype, with autograd."""
    mask = torch.zeros(len(q), len(kv) + 1, dtype=torch.bool, device=q.device)
    mask.scatter_(1, indices.long().where(indices >= 0, len(kv)), True)
    logits = torch.einsum("thd,sd->ths", q, kv) * scale
    logits = logits.masked_fill(~mask[:, None, :-1], float("-inf"))
    return torch.softmax(logits, -1) @ kv[:, :d_v], torch.logsumexp(logits.float(), -1)


def run(function, q: Tensor, kv: Tensor, indices: Tensor, grad: Tensor) -> Results:
    """out, lse, grad_q, grad_kv."""
    q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
    out, lse = function(q, kv, indices, SCALE, D_V)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, kv), grad)


def relative_errors(results: Results, exact: Results) -> list[float]:
    """Of out, lse, grad_q, grad_kv; NaN where an element was not written."""
    return [
        ((x.float() - true).norm() / true.norm()).item()
        for x, true in zip(results, exact, strict=True)
    ]


def poison_free_memory(num_bytes: int) -> None:
    """Leave NaN in the memory that the next outputs will be given."""
    torch.cuda.synchronize()
    torch.full((num_bytes // 4,), torch.nan, device="cuda")


def check(q: Tensor, kv: Tensor, indices: Tensor, grad: Tensor) -> tuple[list[float], bool]:
    """Errors on all rows, and whether they are small enough."""
    rows = torch.linspace(0, len(q) - 1, 128, device="cuda").long()
    some = q[rows], kv, indices[rows], grad[rows]
    exact_some = run(reference.sparse_mla, *(x.float() for x in some[:2]), some[2], some[3].float())
    bounds = relative_errors(run(attend_in_bf16, *some), exact_some)
    exact = run(reference.sparse_mla, q.float(), kv.float(), indices, grad.float())
    poison_free_memory(4 * q.nbytes)
    errors = relative_errors(run(sparse_mla, q, kv, indices, grad), exact)
    small = relative_errors(run(sparse_mla, *some), exact_some)
    good = all(
        e <= 2 * b + 1e-6 for found in (errors, small) for e, b in zip(found, bounds, strict=True)
    )
    return errors, good


def measure(case: Case) -> dict[str, object]:
    """One JSON line."""
    torch.manual_seed(0)
    shape = case.t_q, case.num_heads
    q = torch.randn(*shape, D_QK, device="cuda").bfloat16()
    kv = torch.randn(case.t_k, D_QK, device="cuda").bfloat16()
    grad = torch.randn(*shape, D_V, device="cuda").bfloat16()
    indices = case.select(case.t_q, case.t_k, TOPK)
    errors, good = check(q, kv, indices, grad)
    line: dict[str, object] = {"case": case.name, "errors": errors, "correct": good}
    if not good:
        return line
    q, kv = q.requires_grad_(), kv.requires_grad_()
    out, _ = sparse_mla(q, kv, indices, SCALE, D_V)
    times = interleaved_medians(
        {
            "fwd": lambda: sparse_mla(q.detach(), kv.detach(), indices, SCALE, D_V),
            "bwd": lambda: torch.autograd.grad(out, (q, kv), grad, retain_graph=True),
        }
    )
    pairs = int((indices >= 0).sum()) * case.num_heads
    line |= {f"{name}_ms": ms for name, ms in times.items()}
    line["fwd_tflops"] = 2176 * pairs / times["fwd"] / 1e9
    line["bwd_tflops"] = 5504 * pairs / times["bwd"] / 1e9
    return line


def table_row(line: dict) -> str:
    """One line of text."""
    errors = " ".join(f"{e:.1e}" for e in line["errors"])
    if not line["correct"]:
        return f"{line['case']:22} WRONG  errors {errors}"
    return (
        f"{line['case']:22} fwd {line['fwd_ms']:7.3f} ms {line['fwd_tflops']:4.0f} TF  "
        f"bwd {line['bwd_ms']:7.3f} ms {line['bwd_tflops']:4.0f} TF  "
        f"sum {line['fwd_ms'] + line['bwd_ms']:7.3f}  errors {errors}"
    )


def main() -> None:
    """Measure all cases and print a table last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", type=int, default=len(CASES))
    arguments = parser.parse_args()
    lines = [measure(case) for case in CASES[: arguments.cases]]
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(table_row(line) for line in lines))


if __name__ == "__main__":
    main()
