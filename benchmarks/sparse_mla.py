"""Checks, then times sparse_mla of the backend "triton" on one GPU.

    python -m benchmarks.sparse_mla [--json FILE]

Error is ||ours - exact|| / ||exact||, exact in fp32, and may be at most twice that of the same
formula in bf16 PyTorch. No time is printed for an output that fails. TFLOP/s count valid
(query, key) pairs only: 2176 operations per pair and head forward, 5504 backward. "same bits" is
the backward of deterministic=True. Documents of at most topk tokens are timed on the dense path:
causal_attention of 64 heads with d_qk = d_v = 256.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.selections import drifting, random_causal
from benchmarks.timing import interleaved_medians
from glm5.ops.causal_attention import causal_attention
from glm5.ops.sparse_mla import reference
from glm5.ops.sparse_mla.autograd import sparse_mla

repeatable = partial(sparse_mla, deterministic=True)

D_QK, D_V, TOPK, SCALE = 576, 512, 2048, 1 / 16
DENSE = ([2048], [2048] * 4, [1999], [100, 700, 2048, 1500, 33, 1024], [97] * 40)
Results = tuple[Tensor, ...]


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
    Case("8K, 8 heads drifting", 8, 8192, 8192, drifting),
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


def check(
    q: Tensor, kv: Tensor, indices: Tensor, grad: Tensor
) -> tuple[list[float], list[float], bool]:
    """Errors on all rows, those of deterministic gradients, and whether all are small enough."""
    rows = torch.linspace(0, len(q) - 1, 128, device="cuda").long()
    some = q[rows], kv, indices[rows], grad[rows]
    exact_some = run(reference.sparse_mla, *(x.float() for x in some[:2]), some[2], some[3].float())
    bounds = relative_errors(run(attend_in_bf16, *some), exact_some)
    exact = run(reference.sparse_mla, q.float(), kv.float(), indices, grad.float())
    poison_free_memory(4 * q.nbytes)
    errors = relative_errors(run(sparse_mla, q, kv, indices, grad), exact)
    small = relative_errors(run(sparse_mla, *some), exact_some)
    first, again = (run(repeatable, q, kv, indices, grad) for _ in range(2))
    same_bits = relative_errors(first, exact)
    good = all(map(torch.equal, first, again)) and all(
        e <= 2 * b + 1e-6
        for found in (errors, small, same_bits)
        for e, b in zip(found, bounds, strict=True)
    )
    return errors, same_bits, good


def measure(case: Case) -> dict[str, object]:
    """One JSON line."""
    torch.manual_seed(0)
    shape = case.t_q, case.num_heads
    q = torch.randn(*shape, D_QK, device="cuda").bfloat16()
    kv = torch.randn(case.t_k, D_QK, device="cuda").bfloat16()
    grad = torch.randn(*shape, D_V, device="cuda").bfloat16()
    indices = case.select(case.t_q, case.t_k, TOPK)
    errors, same_bits, good = check(q, kv, indices, grad)
    line: dict[str, object] = {
        "case": case.name,
        "errors": errors,
        "same_bits_errors": same_bits,
        "correct": good,
    }
    if not good:
        return line
    q, kv = q.requires_grad_(), kv.requires_grad_()
    out, _ = sparse_mla(q, kv, indices, SCALE, D_V)
    out_again, _ = repeatable(q, kv, indices, SCALE, D_V)
    times = interleaved_medians(
        {
            "fwd": lambda: sparse_mla(q.detach(), kv.detach(), indices, SCALE, D_V),
            "bwd": lambda: torch.autograd.grad(out, (q, kv), grad, retain_graph=True),
            "same_bits_bwd": lambda: torch.autograd.grad(
                out_again, (q, kv), grad, retain_graph=True
            ),
        }
    )
    pairs = int((indices >= 0).sum()) * case.num_heads
    line |= {f"{name}_ms": ms for name, ms in times.items()}
    line["fwd_tflops"] = 2176 * pairs / times["fwd"] / 1e9
    line["bwd_tflops"] = 5504 * pairs / times["bwd"] / 1e9
    return line


def measure_dense(lengths: list[int]) -> dict[str, object]:
    """One JSON line: documents that select all their keys, unabsorbed."""
    torch.manual_seed(0)
    name = f"dense, {len(lengths)} documents of {min(lengths)} to {max(lengths)}"
    tensors = [torch.randn(sum(lengths), 64, 256, device="cuda").bfloat16() for _ in range(4)]
    leaves, grad = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    out = causal_attention(*leaves, lengths, SCALE)
    grads = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    exact_leaves = [x.detach().float().requires_grad_() for x in leaves]
    exact = causal_attention(*exact_leaves, lengths, SCALE)
    exact_grads = torch.autograd.grad(exact, exact_leaves, grad.float())
    errors = relative_errors((out.detach(), *grads), (exact.detach(), *exact_grads))
    line: dict[str, object] = {"case": name, "errors": errors, "correct": max(errors) < 5e-3}
    if not line["correct"]:
        return line
    times = interleaved_medians(
        {
            "fwd": lambda: causal_attention(*[x.detach() for x in leaves], lengths, SCALE),
            "bwd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        }
    )
    pairs = sum(length * (length + 1) // 2 for length in lengths) * 64
    line |= {f"{name}_ms": ms for name, ms in times.items()}
    line["fwd_tflops"] = 1024 * pairs / times["fwd"] / 1e9
    line["bwd_tflops"] = 2560 * pairs / times["bwd"] / 1e9
    return line


def table_row(line: dict) -> str:
    """One line of text."""
    errors = " ".join(f"{e:.1e}" for e in line["errors"])
    if not line["correct"]:
        return f"{line['case']:22} WRONG  errors {errors}"
    same_bits = f"same bits {line['same_bits_bwd_ms']:7.3f} " if "same_bits_bwd_ms" in line else ""
    if same_bits:
        errors += " / " + " ".join(f"{e:.1e}" for e in line["same_bits_errors"][2:])
    return (
        f"{line['case']:22} fwd {line['fwd_ms']:7.3f} ms {line['fwd_tflops']:4.0f} TF  "
        f"bwd {line['bwd_ms']:7.3f} ms {line['bwd_tflops']:4.0f} TF  {same_bits}"
        f"sum {line['fwd_ms'] + line['bwd_ms']:7.3f}  errors {errors}"
    )


def main() -> None:
    """Measure all cases and print a table last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", type=int, default=len(CASES))
    arguments = parser.parse_args()
    lines = [measure(case) for case in CASES[: arguments.cases]]
    lines += [measure_dense(lengths) for lengths in DENSE]
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(table_row(line) for line in lines))


if __name__ == "__main__":
    main()
