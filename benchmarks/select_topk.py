"""Time the fused indexer (select_topk of the triton backend) against plain PyTorch, in one process.

    python -m benchmarks.select_topk [tokens ...] [--json FILE]

32 heads of 128 dimensions, topk 2048, one causal sequence, bf16. A length is timed only after its
selection has passed the checks. Times are device times: CUDA events, medians of interleaved rounds,
behind a spin kernel that lets the host run ahead.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.timing import interleaved_medians
from glm5.ops.indexer.selection import select_from_scores
from glm5.ops.indexer.triton_select import chunk_scorer, chunk_shape, select_topk

NUM_HEADS, HEAD_DIM, TOPK = 32, 128, 2048
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_inputs(num_tokens: int) -> Inputs:
    """Random q, k, weights and causal bounds."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    q = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device="cuda", generator=generator).bfloat16()
    k = torch.randn(num_tokens, HEAD_DIM, device="cuda", generator=generator).bfloat16()
    weights = torch.randn(num_tokens, NUM_HEADS, device="cuda", generator=generator)
    ends = torch.arange(1, num_tokens + 1, dtype=torch.int32, device="cuda")
    return q, k, weights, torch.zeros_like(ends), ends


def torch_select_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """The peer: a bf16 matmul over the causal prefix of each chunk of rows, and torch.topk."""
    del starts  # one causal sequence
    num_tokens, rows_per_chunk = len(q), max(1, 2**29 // (NUM_HEADS * len(q) * 2))
    topk_indices = torch.full((num_tokens, TOPK), -1, dtype=torch.int32, device=q.device)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=q.device)
    for first in range(0, num_tokens, rows_per_chunk):
        rows = slice(first, min(first + rows_per_chunk, num_tokens))
        keys = k[: rows.stop]
        similarity = torch.relu_((q[rows].flatten(0, 1) @ keys.t()).view(-1, NUM_HEADS, rows.stop))
        scores = torch.bmm(weights[rows, None].bfloat16(), similarity)[:, 0].float()
        scores.masked_fill_(positions[: rows.stop] >= ends[rows, None], -torch.inf)
        best = scores.topk(min(TOPK, rows.stop), dim=-1, sorted=False)
        topk_indices[rows, : best.indices.shape[1]] = best.indices.int().masked_fill_(
            best.values == -torch.inf, -1
        )
    return topk_indices


def check(inputs: Inputs) -> float:
    """Check the selection; returns its recall against fp64 scores on sampled rows."""
    q, k, weights, starts, ends = inputs
    selected = select_topk(*inputs, TOPK)
    assert torch.equal(selected, select_topk(*inputs, TOPK)), "not deterministic"
    num_tokens = len(q)
    for first in (0, TOPK - 16, num_tokens // 2, num_tokens - 64):
        rows = slice(first, first + 64)
        part = (q[rows], k, weights[rows], starts[rows], ends[rows])
        num_rows, width = chunk_shape(*part[:2])
        scores = torch.full((num_rows, width), torch.nan, device="cuda")
        chunk_scorer(*part, TOPK, num_rows)(0, scores)
        expected = select_from_scores(scores[:64, :num_tokens], *part[3:], TOPK)
        assert torch.equal(selected[rows], expected), "not the selection of its own scores"
    sample = [0, TOPK - 1, TOPK, TOPK + 1, num_tokens // 2 + 1, num_tokens - 1]
    return min(_recall(inputs, selected, row) for row in sample)


def _recall(inputs: Inputs, selected: Tensor, row: int) -> float:
    q, k, weights, _, ends = inputs
    num_valid = int(ends[row])
    similarity = torch.relu(q[row].double() @ k[:num_valid].double().t())
    best = (weights[row].double() @ similarity).topk(min(TOPK, num_valid)).indices
    chosen = selected[row][selected[row] >= 0]
    assert len(chosen) == len(best), "wrong number of keys"
    recall = torch.isin(chosen, best).double().mean().item()
    assert recall > 0.998, f"recall {recall} in row {row}"
    return recall


def extra_memory(function: Callable[[], Tensor]) -> int:
    """Peak bytes beyond what was allocated before the call and the result itself."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - result.nbytes


def run(num_tokens: int) -> dict[str, Any]:
    """Check and time one length."""
    inputs = make_inputs(num_tokens)
    recall = check(inputs)
    functions: dict[str, Callable[[], Tensor]] = {
        "triton": lambda: select_topk(*inputs, TOPK),
        "torch": lambda: torch_select_topk(*inputs),
    }
    times = interleaved_medians(functions)
    flops = 2 * NUM_HEADS * HEAD_DIM * num_tokens * (num_tokens + 1) // 2
    return {
        "op": "select_topk",
        "tokens": num_tokens,
        "recall": recall,
        **{f"{name}_ms": ms for name, ms in times.items()},
        **{f"{name}_tflops": flops / ms / 1e9 for name, ms in times.items()},
        **{f"{name}_bytes": extra_memory(function) for name, function in functions.items()},
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    """Run every length and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", type=int, nargs="*", default=[4096, 8192, 32768])
    parser.add_argument("--json", type=Path, help="also write one line per length to this file")
    options = parser.parse_args()
    results = [run(num_tokens) for num_tokens in options.lengths]
    if options.json:
        options.json.write_text("".join(json.dumps(result) + "\n" for result in results))
    print("tokens   recall   triton ms  TFLOP/s  extra GiB   torch ms  TFLOP/s  extra GiB")
    for r in results:
        print(
            f"{r['tokens']:6} {r['recall']:8.5f} {r['triton_ms']:11.3f} {r['triton_tflops']:8.0f}"
            f" {r['triton_bytes'] / 2**30:10.2f} {r['torch_ms']:10.3f} {r['torch_tflops']:8.0f}"
            f" {r['torch_bytes'] / 2**30:10.2f}"
        )


if __name__ == "__main__":
    main()
