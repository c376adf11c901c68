"""Checks on GPUs that every layout of two computes what one does; run by torchrun, three times.

    torchrun --nproc_per_node 1 -m tests.parallel.nccl FOLDER one
    torchrun --nproc_per_node 2 -m tests.parallel.nccl FOLDER layouts
    torchrun --nproc_per_node 1 -m tests.parallel.nccl FOLDER exports

The first run makes the model and notes what one GPU finds, the second one compares, the third one
compares what is exported of the checkpoints that both saved. They exit with an error when a layout
is off by more than its budget.

fp32: kernels and ranks add in another order, so tensors differ by rounding. bf16: the budget is the
error that one GPU makes itself, measured against its own fp32 run. The model of the bf16 cases has
no discrete decision: see `without_decisions`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from glm5.checkpoint.tiny import write_tiny
from glm5.cli.quiet import quiet_libraries
from glm5.runtime.distributed import Layout, default_device, ensure_distributed, shut_down
from tests.parallel.assemble import assemble
from tests.parallel.budget import budget_used, largest_error
from tests.parallel.exports import exported
from tests.parallel.jobs import Job, observe, without_decisions

LAYOUTS = {
    "dp2": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "ep2": Layout(ep=2),
    "cp2": Layout(cp=2),
    "etp2": Layout(etp=2),
    "tp2ep2": Layout(tp=2, ep=2),
}
FP32_RECIPES = ("adapters", "shared", "indexer")
RECIPES = (*FP32_RECIPES, "bf16")
# docs/parallelism.md: at most 3.5e-6 over every layout and recipe here
FP32_BOUND = 2e-5


@dataclass(frozen=True)
class Line:
    """One layout and recipe against one GPU."""

    layout: str
    recipe: str
    loss: float
    gradients: float
    weights: float
    limit: float

    @property
    def ok(self) -> bool:
        return max(self.loss, self.gradients, self.weights) <= self.limit


def find(folder: Path, name: str, recipe: str) -> dict[str, Any]:
    """What this rank finds; leaves no parallel state behind."""
    try:
        return observe(job(folder, name, recipe))
    finally:
        parallel_state.destroy_model_parallel()


def job(folder: Path, name: str, recipe: str) -> Job:
    model = folder / ("tiny" if recipe in FP32_RECIPES else "undecided")
    return Job(model, folder / name / recipe, LAYOUTS.get(name, Layout()), recipe)


def note_one(folder: Path) -> bool:
    """The reference: one GPU in fp32 and in bf16."""
    folder.mkdir(parents=True)
    write_tiny(folder / "tiny", "5.2")
    without_decisions(folder / "tiny", folder / "undecided")
    found = {recipe: find(folder, "one", recipe) for recipe in (*RECIPES, "exact")}
    torch.save(found, folder / "one.pt")
    return True


def compare(folder: Path) -> bool:
    """Prints one line for each layout and recipe."""
    one = torch.load(folder / "one.pt", weights_only=True)
    good = True
    for name in LAYOUTS:
        for recipe in RECIPES:
            mine = find(folder, name, recipe)
            torch.save(mine, folder / f"{dist.get_rank()}.pt")
            dist.barrier()
            if dist.get_rank() == 0:
                ranks = [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(2)]
                line = judge(name, recipe, ranks, one)
                print(line, "ok" if line.ok else "FAILED", flush=True)
                good &= line.ok
            dist.barrier()
    return good


def export(folder: Path) -> bool:
    """Prints one line for each layout and recipe in fp32: how far its export is from one GPU's."""
    good = True
    for recipe in FP32_RECIPES:
        one = dict(exported(job(folder, "one", recipe)))
        for name in LAYOUTS:
            error = largest_error(dict(exported(job(folder, name, recipe))), one)
            print(f"export of {name}, {recipe}: {error:.1e}", flush=True)
            good &= error <= FP32_BOUND
    return good


def judge(name: str, recipe: str, ranks: list[dict[str, Any]], one: dict[str, Any]) -> Line:
    """Errors of a layout: relative in fp32, in parts of one GPU's own error in bf16."""
    peer = one[recipe]
    loss = max(
        abs(step["loss"] - other["loss"]) / other["loss"]
        for step, other in zip(ranks[-1]["steps"], peer["steps"], strict=True)
    )
    found = {key: assemble(ranks, key, peer[key]) for key in ("gradients", "weights")}
    if recipe != "bf16":
        errors = {key: largest_error(found[key], peer[key]) for key in found}
        return Line(name, recipe, loss, errors["gradients"], errors["weights"], FP32_BOUND)
    exact = one["exact"]
    used = {key: budget_used(found[key], peer[key], exact[key]) for key in found}
    return Line(name, recipe, loss, used["gradients"], used["weights"], 1.0)


def main() -> int:
    quiet_libraries()
    folder, what = Path(sys.argv[1]), {"one": note_one, "layouts": compare, "exports": export}
    ensure_distributed(default_device())
    parallel_state.destroy_model_parallel()
    good = what[sys.argv[2]](folder)
    shut_down()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
