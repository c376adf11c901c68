"""The gap between trainer and engine by how each multiplies FP8 weights, on tiny models, on a CPU.

    python -m benchmarks.rl_gap_fp8 [--seeds 3]

For float32 and bfloat16 and every pair of conventions: two steps of GRPO with a LoRA on an FP8
checkpoint, the rollout's choices replayed, prompts above index_topk; the second step is sampled
with an adapter that has moved. Prints the mean of |d| and of the KL over steps and seeds, and the
largest |d| of a step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from glm5.checkpoint.tiny import write_tiny
from glm5.cli.quiet import quiet_libraries
from glm5.rl.run import train_rl
from glm5.rl.run_config import RlConfig
from glm5.train.metrics import read_metrics

DTYPES = ("float32", "bfloat16")
SIDES = tuple(product((False, True), repeat=2))
WORDS = {False: "exact", True: "float8"}
REWARD = '''"""Something to differ in."""


def letters(text: str, label: object, row: object) -> float:
    return sum(character.isalnum() for character in text) / max(1, len(text))
'''


def gaps(folder: Path, base: Path, dtype: str, trainer: bool, engine: bool, seed: int) -> list[Any]:
    """The metrics of both steps."""
    out = folder / f"{dtype}-{trainer}-{engine}-{seed}"
    tables = {
        "model": {
            "path": str(base),
            "dtype": dtype,
            "base_weights": "fp8",
            "fp8_compute": trainer,
        },
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "lora": {"rank": 2, "alpha": 4.0},
        "optimizer": {"lr": 3e-2, "schedule": "constant"},
        "train": {"steps": 2, "seed": seed},
        "rl": {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_tokens_per_micro_batch": 512,
            "replay": "both",
        },
        "rollout": {"engine": "hf", "max_new_tokens": 12, "fp8_activations": engine},
        "reward": {"kind": "function", "function": f"{folder / 'reward.py'}:letters"},
        "output": {"dir": str(out)},
    }
    train_rl(RlConfig.from_dict(tables, source="the benchmark"), quiet=True)
    return read_metrics(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="models and runs")
    args = parser.parse_args()
    quiet_libraries()
    print("| dtype | trainer | engine | mean abs(d), nat | KL | largest mean abs(d) of a step |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "reward.py").write_text(REWARD)
        rows = [{"prompt": "repeat " + "ab" * (n % 4 + 1)} for n in range(8)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        bases = [
            write_tiny(folder / f"base-{seed}", "5.2", seed, fp8=True) for seed in range(args.seeds)
        ]
        for dtype, (trainer, engine) in product(DTYPES, SIDES):
            lines = [
                line
                for seed, base in enumerate(bases)
                for line in gaps(folder, base, dtype, trainer, engine, seed)
            ]
            diffs = [line["gap_abs_diff"] for line in lines]
            kl = fmean(line["gap_kl"] for line in lines)
            print(
                f"| {dtype} | {WORDS[trainer]} | {WORDS[engine]} | {fmean(diffs):.2g} | {kl:.2g} "
                f"| {max(diffs):.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
